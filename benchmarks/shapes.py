"""Named model shapes, a loader with random weights, and where vLLM's graphs are cut in pieces,
without loading `prefetch_runtime`.

Reference runs must not hold any of this project's code, so its files are read by their path.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent / "prefetch_runtime"


def _read(path: Path) -> Any:
    spec = spec_from_file_location(f"benchmarks_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_shapes, _weights = _read(_PACKAGE / "shapes.py"), _read(_PACKAGE / "vllm" / "random_weights.py")

SHAPES, shape_config, write_shape = _shapes.SHAPES, _shapes.shape_config, _shapes.write_shape
LOAD_FORMAT, register_loader = _weights.LOAD_FORMAT, _weights.register_loader
splitting_ops = _read(_PACKAGE / "vllm" / "bench_engine.py").splitting_ops
