"""vLLM's own parser reads the options that `generate` and `trace` pass on."""

import json

import pytest

from prefetch_runtime.vllm.offline import parsed

pytestmark = pytest.mark.engine


def test_only_what_is_given_is_an_argument() -> None:
    assert parsed([]) == {}
    given = ["--gpu-memory-utilization", "0.3", "--max_num_seqs=4", "--no-enable-prefix-caching"]
    assert parsed(given) == {
        "gpu_memory_utilization": 0.3,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    }


def test_an_option_that_is_given_its_default_is_still_given() -> None:
    assert parsed(["--seed", "0"]) == {"seed": 0}


def test_json_is_read_as_vllm_reads_it() -> None:
    overrides = {"max_position_embeddings": 64}
    assert parsed(["--hf-overrides", json.dumps(overrides)]) == {"hf_overrides": overrides}
    assert parsed(["--hf-overrides.max_position_embeddings", "64"]) == {"hf_overrides": overrides}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--gpu-memory-utilisation", "0.3"], "unrecognized arguments: --gpu-memory-utilisation"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs"),
        (["--moe-backend", "fast"], "invalid choice: 'fast'"),
        (["--max-num-seqs"], "expected one argument"),
    ],
)
def test_what_vllm_does_not_know_is_an_error_that_says_so(given: list[str], words: str) -> None:
    with pytest.raises(ValueError, match="vLLM's options: ") as refused:
        parsed(given)
    assert words in str(refused.value)
