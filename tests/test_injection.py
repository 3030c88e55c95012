"""Routing injection: a routing of ours in place of the router's."""

import pytest
import torch

from prefetch_runtime.injection import RoutingInjection

CPU = torch.device("cpu")
ROUTING = torch.arange(3 * 2 * 4 * 2).reshape(3, 2, 4, 2)
"""3 steps, 2 layers, 4 tokens, top 2; every id another."""


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_ids_are_replaced_in_shape_and_dtype(tokens: int, dtype: torch.dtype) -> None:
    injection = RoutingInjection(ROUTING, CPU)
    for layer in range(2):
        got = injection.replace(layer, torch.full((tokens, 2), 99, dtype=dtype))
        assert got.dtype == dtype
        assert got.tolist() == ROUTING[0, layer, :tokens].tolist()


def test_the_clock_walks_through_the_steps_and_starts_again() -> None:
    injection = RoutingInjection(ROUTING, CPU)
    asked = torch.zeros((4, 2), dtype=torch.int32)
    for step in range(7):
        assert injection.replace(1, asked).tolist() == ROUTING[step % 3, 1].tolist()
        injection.advance()


def test_the_clock_is_a_tensor_that_stays_where_it_is() -> None:
    injection = RoutingInjection(ROUTING, CPU)
    address = injection.clock.data_ptr()
    for _ in range(4):
        injection.advance()
    assert injection.clock.data_ptr() == address
    assert injection.clock.tolist() == [1]


def test_the_routers_ids_are_left_alone() -> None:
    asked = torch.full((2, 2), 7)
    RoutingInjection(ROUTING, CPU).replace(0, asked)
    assert asked.tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize(
    ("layer_idx", "shape"), [(2, (1, 2)), (0, (5, 2)), (0, (1, 3))], ids=["layer", "tokens", "k"]
)
def test_a_call_that_the_routing_does_not_cover_is_refused(
    layer_idx: int, shape: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="is for 2 layers, 4 tokens and top 2; layer"):
        RoutingInjection(ROUTING, CPU).replace(layer_idx, torch.zeros(shape, dtype=torch.int32))


def test_a_routing_of_another_shape_or_with_negative_ids_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[steps, layers, tokens, top_k\]"):
        RoutingInjection(ROUTING[0], CPU)
    with pytest.raises(ValueError, match=r"must be \[steps, layers, tokens, top_k\]"):
        RoutingInjection(ROUTING[:0], CPU)
    with pytest.raises(ValueError, match="negative expert ids"):
        RoutingInjection(ROUTING - 1, CPU)


GUESSES = torch.arange(3 * 1 * 4 * 3).reshape(3, 1, 4, 3)


def test_guesses_follow_the_clock() -> None:
    injection = RoutingInjection(ROUTING, CPU, guesses=GUESSES)
    assert injection.guess(0, 2).tolist() == GUESSES[0, 0, :2].tolist()
    injection.advance()
    assert injection.guess(0, 4).tolist() == GUESSES[1, 0].tolist()


def test_another_routing_takes_its_place_and_starts_with_its_first_step() -> None:
    injection = RoutingInjection(ROUTING, CPU, guesses=GUESSES)
    injection.advance()
    addresses = [t.data_ptr() for t in (injection.routing, injection.guesses, injection.clock)]  # type: ignore[union-attr]
    injection.load(ROUTING + 5, GUESSES + 1)
    injection.advance()
    asked = torch.zeros((4, 2), dtype=torch.int32)
    assert injection.replace(0, asked).tolist() == (ROUTING[0, 0] + 5).tolist()
    assert injection.guess(0, 4).tolist() == (GUESSES[0, 0] + 1).tolist()
    assert addresses == [
        t.data_ptr()  # type: ignore[union-attr]
        for t in (injection.routing, injection.guesses, injection.clock)
    ]
    injection.load(ROUTING)
    assert injection.guesses.tolist() == (GUESSES + 1).tolist()  # type: ignore[union-attr]


def test_guesses_and_routings_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"guesses must be \[3, 1, 4, guesses\]"):
        RoutingInjection(ROUTING, CPU, guesses=GUESSES[:2])
    injection = RoutingInjection(ROUTING, CPU)
    with pytest.raises(ValueError, match=r"the routing had shape \(3, 2, 4, 2\), got \(2, 2, 4"):
        injection.load(ROUTING[:2])
    with pytest.raises(ValueError, match="the guesses had shape None"):
        injection.load(ROUTING, GUESSES)
