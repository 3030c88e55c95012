"""Makes routing that reuses experts the way real models do, for benches that have no model.

The router's logits of layer l for token t are modelled as a sum, in units of the token noise:

    popularity[l, e]                 -zipf * log(rank of e in l), fixed for the model
    + topic * U[l, e] . u(t)         u stays until the topic switches
    + context * V[l, e] . v(t)       v wanders: its correlation from token to token is `persistence`
    + noise                          a share `layer_dependence` of its variance is common to the
                                     layers (W[l, e] . w(t)), the rest is independent

and the token goes to the top_k highest. U, V, W are random directions, so that what one layer
chooses tells about the next. The recorded guesses of the next router are the same logits with noise
of their own, whose size is set so that they reach a given accuracy: as in real models, the errors
are near misses.
"""

import difflib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .trace import Trace

_LATENT = 32  # dimensions of u, v and w
_CALIBRATION_TOKENS = 512

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingModel:
    """What to imitate. Raises ValueError for values that cannot be."""

    num_layers: int
    num_experts: int
    top_k: int
    zipf: float
    topic: float
    context: float
    persistence: float
    topic_tokens: float = 200.0
    """Mean number of tokens until the topic switches."""
    layer_dependence: float = 0.5
    """Share, 0 to 1, of the token noise that the layers have in common."""
    accuracy: float | None = 0.886
    """Share of the chosen experts among the first top_k guesses; None guesses at random."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts or self.num_layers < 1:
            raise ValueError(
                f"needs num_layers >= 1 and 1 <= top_k <= num_experts, got {self.num_layers} "
                f"layers, top_k={self.top_k} of {self.num_experts} experts"
            )
        for name in ("zipf", "topic", "context"):
            if not 0 <= getattr(self, name) < 100:
                raise ValueError(f"{name} must be 0 to 100, got {getattr(self, name)}")
        for name in ("persistence", "layer_dependence"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be 0 to 1, got {getattr(self, name)}")
        if not self.topic_tokens >= 1:
            raise ValueError(f"topic_tokens must be at least 1, got {self.topic_tokens}")
        chance = self.top_k / self.num_experts
        if self.accuracy is not None and not chance < self.accuracy <= 1:
            raise ValueError(
                f"accuracy must lie above chance ({chance:.3f}) and at most at 1, got "
                f"{self.accuracy}; None guesses at random"
            )


PRESETS = {
    # As published for Qwen3-30B-A3B: an LRU cache of 8, 24, 49, 81 of 128 slots hits 36.6, 74.1,
    # 89.4, 96.2 % in the first 256 tokens, one of 51 slots 90 to 95 % when warm, and the next gate
    # finds 88.6 % of the chosen. Here, mean of six seeds: 37, 73, 90, 95; 93; 88.6.
    "qwen3-30b-a3b": RoutingModel(
        num_layers=48, num_experts=128, top_k=8,
        zipf=0.79, topic=0.8, context=0.41, persistence=0.946, topic_tokens=540,
    ),
    # Control: every set of experts equally likely, nothing to learn, guesses at random.
    "uniform": RoutingModel(
        num_layers=48, num_experts=128, top_k=8,
        zipf=0.0, topic=0.0, context=0.0, persistence=0.0, layer_dependence=0.0, accuracy=None,
    ),
}  # fmt: skip


def create_routing_model(name: str, **changes: float | int | None) -> RoutingModel:
    """A preset, with some of its fields changed. Raises ValueError for an unknown name or value."""
    if name not in PRESETS:
        close = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown routing model {name!r}; choose one of {', '.join(PRESETS)}{hint}"
        )
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]


def generate_routing(
    model: RoutingModel, num_steps: int, *, batch_size: int = 1, seed: int = 0
) -> Trace:
    """A trace of `num_steps` steps of `batch_size` tokens, each of its own request.

    Equal arguments give equal traces on one machine. `topk` and `next_gate` are ordered best first;
    `next_gate` has 2 * top_k guesses (at most all experts). Raises ValueError for sizes below 1.
    """
    if num_steps < 1 or batch_size < 1:
        raise ValueError(f"needs at least one step of one token, got {num_steps} x {batch_size}")
    rng = np.random.default_rng(seed)
    streams = [_latents(model, num_steps, rng) for _ in range(batch_size)]
    # Rows of one step stand together: [steps, batch] flattened.
    latents = np.stack(streams, axis=1).reshape(num_steps * batch_size, 3 * _LATENT)
    num_tokens, num_experts, top_k = len(latents), model.num_experts, model.top_k
    num_guesses = min(2 * top_k, num_experts)
    topk = np.empty((num_tokens, model.num_layers, top_k), dtype=np.int16)
    next_gate = np.empty((num_tokens, model.num_layers - 1, num_guesses), dtype=np.int16)
    for layer_idx in range(model.num_layers):
        logits = _logits(model, latents, rng)
        topk[:, layer_idx] = _highest(logits, top_k)
        if layer_idx:
            noisy = _guess(model, logits, topk[:, layer_idx], rng)
            next_gate[:, layer_idx - 1] = _highest(noisy, num_guesses)
    return Trace(
        topk=topk,
        sequence=np.tile(np.arange(batch_size, dtype=np.int32), num_steps),
        num_experts=num_experts,
        next_gate=next_gate if model.num_layers > 1 else None,
        step=np.repeat(np.arange(num_steps, dtype=np.int32), batch_size),
    )


def _latents(model: RoutingModel, num_steps: int, rng: np.random.Generator) -> FloatArray:
    """[steps, 3 * _LATENT]: u, v and w of one stream, weighted, each of the same length."""
    switches = rng.random(num_steps) < 1 / model.topic_tokens
    topics = rng.standard_normal((int(switches.sum()) + 1, _LATENT))
    u = topics[np.cumsum(switches)]
    v = rng.standard_normal((num_steps, _LATENT))
    fresh = np.sqrt(1 - model.persistence**2)
    for step in range(1, num_steps):
        v[step] = model.persistence * v[step - 1] + fresh * v[step]
    w = rng.standard_normal((num_steps, _LATENT))
    parts = [
        weight * part / np.linalg.norm(part, axis=1, keepdims=True)
        for weight, part in (
            (model.topic, u),
            (model.context, v),
            (np.sqrt(model.layer_dependence), w),
        )
    ]
    latents: FloatArray = np.concatenate(parts, axis=1).astype(np.float32)
    return latents


def _logits(model: RoutingModel, latents: FloatArray, rng: np.random.Generator) -> FloatArray:
    """[tokens, experts] of one layer."""
    num_experts = model.num_experts
    popularity = -model.zipf * np.log1p(rng.permutation(num_experts)).astype(np.float32)
    directions = rng.standard_normal((latents.shape[1], num_experts), dtype=np.float32)
    own = rng.standard_normal((len(latents), num_experts), dtype=np.float32)
    own_weight = np.float32(np.sqrt(1 - model.layer_dependence))
    logits: FloatArray = popularity + latents @ directions + own_weight * own
    return logits


def _guess(
    model: RoutingModel, logits: FloatArray, chosen: npt.NDArray[np.int16], rng: np.random.Generator
) -> FloatArray:
    """Logits with as much noise as makes the top_k guesses as accurate as the model says."""
    noise = rng.standard_normal(logits.shape, dtype=np.float32)
    if model.accuracy is None:
        return noise
    some = slice(_CALIBRATION_TOKENS)
    low, high = 0.0, 64.0  # size of the noise: exact, and next to chance
    for _ in range(16):
        middle = (low + high) / 2
        guesses = _highest(logits[some] + np.float32(middle) * noise[some], model.top_k)
        found = (guesses[:, :, None] == chosen[some, None, :]).any(axis=2).mean()
        low, high = (middle, high) if found > model.accuracy else (low, middle)
    noisy: FloatArray = logits + np.float32(low) * noise
    return noisy


def _highest(logits: FloatArray, count: int) -> npt.NDArray[np.int16]:
    """[tokens, count] experts with the highest logits, best first."""
    if count < logits.shape[1]:
        best = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    else:
        best = np.broadcast_to(np.arange(count), logits.shape)
    order = np.argsort(-np.take_along_axis(logits, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1).astype(np.int16)
