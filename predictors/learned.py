"""Predictors that count while they run: their table as a file."""

from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from .base import Predictor, PredictorShape
from .npz import ArraySpec, NpzError, read_arrays, write_arrays


class LearnedPredictor(Predictor):
    """One array of counts, kept as npz under the name of the predictor."""

    highest: ClassVar[int]
    """No count is above it."""
    counts: npt.NDArray[np.int32]

    def __init__(self, shape: PredictorShape) -> None:
        """Raises ValueError for a shape that the predictor cannot work with."""
        raise NotImplementedError

    @classmethod
    def table_shape(cls, shape: PredictorShape) -> tuple[int, ...]:
        """Of `counts`: layers first, then experts, in each dimension all."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write the counts as npz, replacing the file in one move. Raises as `write_arrays`."""
        arrays: dict[str, Any] = {self._array(): self.counts}
        write_arrays(path, **arrays)

    @classmethod
    def load(cls, path: Path, shape: PredictorShape) -> Self:
        """Read what `save` wrote.

        Raises:
            ValueError: it is damaged, no table of this predictor, or one of another model.
            OSError: it cannot be opened.
        """
        predictor = cls(shape)
        predictor.counts[:] = cls._read(path, cls.table_shape(shape))
        return predictor

    @classmethod
    def check_table(cls, path: Path, num_experts: int | None) -> None:
        """Raise as `load` would, as far as the number of experts, or None, tells."""
        shape = PredictorShape(num_layers=2, num_experts=num_experts or 1, top_k=1)
        _, *experts = cls.table_shape(shape)
        cls._read(path, (None, *(num_experts and size for size in experts)))

    @classmethod
    def _read(cls, path: Path, shape: tuple[int | None, ...]) -> npt.NDArray[np.integer]:
        spec = ArraySpec(shape=shape, highest=cls.highest)
        try:
            return read_arrays(path, {cls._array(): spec})[cls._array()]
        except NpzError as error:
            raise NpzError(
                f"{error}; give a table that predictor {cls.name!r} has learned with this model"
            ) from None

    @classmethod
    def _array(cls) -> str:
        return f"{cls.name}_counts"
