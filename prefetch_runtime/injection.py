"""Puts a given routing in place of the router's, on the device: it works under graph replay.

And given guesses in place of the next router's, so that a predictor of any accuracy can be tried.
"""

import torch


class RoutingInjection:
    """A fixed routing in place of the router's, for measurements and tests.

    Step `clock % steps` of the routing is used; the clock is a device tensor that `advance` moves,
    so that a captured graph reads another routing at every replay.
    Shapes: N = steps, L = MoE layers, B = most tokens in a step, K = top_k, T = tokens of a call,
    G = guesses of a token.
    """

    def __init__(
        self,
        routing: torch.Tensor,
        device: torch.device,
        *,
        guesses: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            routing: [N, L, B, K] int; expert ids, distinct within a token.
            guesses: [N, L - 1, B, G] int; what layer l is said to know of layer l + 1, best first,
                -1 for nothing. None: the next router's own guesses.

        Raises:
            ValueError: another shape, or a negative id.
        """
        if routing.dim() != 4 or routing.numel() == 0:
            raise ValueError(f"routing must be [steps, layers, tokens, top_k], got {routing.shape}")
        if int(routing.min()) < 0:
            raise ValueError("routing holds negative expert ids")
        self.routing = routing.to(device=device, dtype=torch.int32).contiguous()
        self.guesses: torch.Tensor | None = None
        if guesses is not None:
            steps, layers, tokens, _ = routing.shape
            if guesses.dim() != 4 or guesses.shape[:3] != (steps, layers - 1, tokens):
                raise ValueError(
                    f"guesses must be [{steps}, {layers - 1}, {tokens}, guesses] to fit the "
                    f"routing, got {tuple(guesses.shape)}"
                )
            self.guesses = guesses.to(device=device, dtype=torch.int32).contiguous()
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step that the routing covers."""
        return self.routing.shape[2]

    def advance(self) -> None:
        """Go on to the next step of the routing; a device operation that a graph may capture."""
        self.clock.add_(1).remainder_(self.routing.shape[0])

    def load(self, routing: torch.Tensor, guesses: torch.Tensor | None = None) -> None:
        """Put others of the same shapes in their place, and start again with their first step.

        Captured graphs read them from their next replay on. `guesses` None leaves those that are
        there. Raises ValueError for other shapes.
        """
        for name, new, old in (
            ("routing", routing, self.routing),
            ("guesses", guesses, self.guesses),
        ):
            if new is None:
                continue
            if old is None or new.shape != old.shape:
                shape = None if old is None else tuple(old.shape)
                raise ValueError(f"the {name} had shape {shape}, got {tuple(new.shape)}")
            old.copy_(new)
        self.clock.fill_(-1)  # `advance` comes before the first layer

    def guess(self, layer_idx: int, num_tokens: int) -> torch.Tensor:
        """[T, G] int32: what layer `layer_idx` is said to know of the next one."""
        assert self.guesses is not None
        return self.guesses.index_select(0, self.clock)[0, layer_idx, :num_tokens]

    def replace(self, layer_idx: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """Injected ids of the shape and dtype of [T, K] `topk_ids`.

        Raises:
            ValueError: the routing has fewer tokens or layers than asked, or another top_k.
        """
        _, layers, tokens, top_k = self.routing.shape
        if topk_ids.shape[0] > tokens or topk_ids.shape[1] != top_k or layer_idx >= layers:
            raise ValueError(
                f"the injected routing is for {layers} layers, {tokens} tokens and top {top_k}; "
                f"layer {layer_idx} asks for {tuple(topk_ids.shape)}"
            )
        step = self.routing.index_select(0, self.clock)[0, layer_idx, : topk_ids.shape[0]]
        return step.to(topk_ids.dtype)
