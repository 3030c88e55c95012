"""Settings of the expert cache: parsed once, checked once, never changed afterwards."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from predictors import PREDICTOR_NAMES
from prefetch_runtime.policies import HOST_POLICY_NAMES, POLICY_NAMES
from prefetch_runtime.waves import MOST_RING_ROWS

Mode = Literal["auto", "full", "segmented", "eager"]

ADDITIONAL_CONFIG_KEY = "prefetch_runtime"
"""Key under which the settings stand in vLLM's `--additional-config`."""

CLI_SPELLING: Mapping[str, str] = {
    "slots_per_layer": "--moe-expert-cache-size",
    "expert_cache_gib": "--moe-expert-cache-gib",
    "mode": "--prefetch-mode",
    "policy": "--eviction-policy",
    "predictor": "--predictor",
    "predictor_widen": "--predictor-widen",
    "predictor_table": "--predictor-table",
    "save_table": "--save-table",
    "prefetch_budget_mib": "--prefetch-budget-mib",
    "staging_slots": "--staging-slots",
    "trace_tokens": "--max-trace-tokens",
    "metrics": "--expert-cache-metrics",
}
"""The option of `prefetch-runtime serve`, `generate` or `trace` that sets each key."""

METRICS_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable naming the folder through which vLLM's processes share their metrics."""

MAX_BUDGET_MIB = 1 << 20
"""More than any prediction names."""
MAX_CACHE_GIB = 1 << 20
"""More than any model's experts weigh."""

POLICIES = POLICY_NAMES + HOST_POLICY_NAMES
PREDICTORS = tuple(name for name in PREDICTOR_NAMES if name != "oracle")  # it knows the future


def spelled(key: str) -> str:
    """Both names of a setting for messages, as in `'slots_per_layer' (--moe-expert-cache-size)`."""
    option = CLI_SPELLING.get(key)
    return f"'{key}' ({option})" if option else f"'{key}'"


AUTO_MODE = "full"
"""The mode that `auto` is where it can run."""


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the setting and the remedy."""


class PrefetchConfig(BaseModel):
    """Settings of the expert cache.

    Build it with `PrefetchConfig.from_mapping`, which words its errors for users.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    slots_per_layer: int | Literal["auto"] = 0
    """Experts of each MoE layer on the device; 0 = off, "auto" = what the KV cache leaves, on
    a CPU half of them."""
    expert_cache_gib: float | None = Field(
        default=None, gt=0, le=MAX_CACHE_GIB, allow_inf_nan=False
    )
    """The same as a total in GiB over all layers; excludes `slots_per_layer`."""
    mode: Mode = "auto"
    """Where the mapping is decided: by kernels inside one captured graph ("full"), by the host
    between captured segments ("segmented"), or by the host at every layer ("eager"). "auto" is the
    first of them that can run."""
    policy: str = "lru"
    """Which slot a newcomer takes."""
    predictor: str = "none"
    """Guesses the next layer's experts ahead of its router."""
    predictor_widen: int = Field(default=2, ge=1, le=16)
    """Experts that a prediction names, as a multiple of top_k."""
    predictor_table: str | None = Field(default=None, min_length=1)
    """An .npz file of what `transition` or `frequency` has learned, to go on from."""
    save_table: str | None = Field(default=None, min_length=1)
    """The .npz file into which what it has learned is written, every 10 s and when the engine
    ends."""
    prefetch_budget_mib: float | Literal["auto"] = "auto"
    """MiB of speculation per layer and step; "auto" = what the link has time for, and nothing where
    speculation does not pay."""
    staging_slots: int | Literal["auto"] = "auto"
    """Experts in the ring, shared by all layers, through which wide steps stream absent experts,
    2 to 1024; "auto" = as many as weigh 288 MiB, at least 4."""
    trace_tokens: int = Field(default=0, ge=0, le=1 << 24)
    """Mode "full": room on the device for a trace of so many tokens; the other modes need none."""
    metrics: bool = False
    """Publish the counters for Prometheus, on vLLM's own /metrics."""

    @model_validator(mode="after")
    def _check(self) -> "PrefetchConfig":
        if isinstance(self.slots_per_layer, int) and self.slots_per_layer < 0:
            raise ValueError(
                f"{spelled('slots_per_layer')} must be 0 (off), a positive number of experts or "
                f"'auto', got {self.slots_per_layer}"
            )
        if self.expert_cache_gib is not None and self.slots_per_layer != 0:
            raise ValueError(
                f"{spelled('slots_per_layer')} and {spelled('expert_cache_gib')} both size the "
                "cache; give one of them"
            )
        budget = self.prefetch_budget_mib
        if budget != "auto" and not 0 <= budget <= MAX_BUDGET_MIB:
            raise ValueError(
                f"{spelled('prefetch_budget_mib')} must be 'auto' or a number of MiB from 0 to "
                f"{MAX_BUDGET_MIB}, got {budget}"
            )
        rows = self.staging_slots
        if rows != "auto" and not 2 <= rows <= MOST_RING_ROWS:
            raise ValueError(
                f"{spelled('staging_slots')} must be 'auto' or a number of experts from 2 to "
                f"{MOST_RING_ROWS}, got {rows}"
            )
        _check_name("policy", self.policy, POLICIES)
        _check_name("predictor", self.predictor, PREDICTORS)
        return self

    @property
    def enabled(self) -> bool:
        """Whether there is a cache at all; off means that vLLM runs untouched."""
        return self.slots_per_layer != 0 or self.expert_cache_gib is not None

    @classmethod
    def from_mapping(cls, settings: object) -> "PrefetchConfig":
        """The settings in `settings`, a mapping as it stands in `--additional-config`.

        Raises:
            ConfigError: unknown or misspelt key, wrong type, value out of range, or two settings
                that exclude each other. The message names the key and the command-line option.
        """
        if settings is None:
            return cls()
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"'{ADDITIONAL_CONFIG_KEY}' in --additional-config must be an object such as "
                f'{{"slots_per_layer": 48}}, got {settings!r}'
            )
        unknown = [key for key in settings if key not in cls.model_fields]
        if unknown:
            raise ConfigError(_unknown_key(str(unknown[0])))
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            raise ConfigError(_worded(error)) from None

    @classmethod
    def from_additional_config(cls, additional_config: object) -> "PrefetchConfig":
        """The settings in the whole of vLLM's `additional_config`; none there means off."""
        if not isinstance(additional_config, Mapping):
            return cls()
        misspelt = [
            key
            for key in additional_config
            if key != ADDITIONAL_CONFIG_KEY
            and get_close_matches(str(key), [ADDITIONAL_CONFIG_KEY], n=1, cutoff=0.8)
        ]
        if misspelt:
            raise ConfigError(
                f"unknown key {misspelt[0]!r} in --additional-config; "
                f"did you mean {ADDITIONAL_CONFIG_KEY!r}?"
            )
        return cls.from_mapping(additional_config.get(ADDITIONAL_CONFIG_KEY))


def _check_name(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    close = get_close_matches(value, choices, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{spelled(key)} is {value!r}, choose one of {', '.join(choices)}{hint}")


def _unknown_key(key: str) -> str:
    known = list(PrefetchConfig.model_fields)
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {spelled(close[0])}?" if close else f"known are {', '.join(known)}"
    return f"unknown setting {key!r} in '{ADDITIONAL_CONFIG_KEY}'; {hint}"


def _worded(error: ValidationError) -> str:
    first: Any = error.errors()[0]
    if not first["loc"]:  # raised by our own check: already worded
        return str(first["msg"]).removeprefix("Value error, ")
    key = str(first["loc"][0])
    if key == "slots_per_layer":
        expected = "must be a whole number of experts (0 = off) or 'auto'"
    elif key == "prefetch_budget_mib":
        expected = "must be 'auto' or a number of MiB"
    elif key == "staging_slots":
        expected = "must be 'auto' or a whole number of experts"
    elif key == "mode":
        expected = "must be one of auto, full, segmented, eager"
    else:
        message = str(first["msg"])
        expected = message[0].lower() + message[1:].removeprefix("nput ")
        expected = expected.removeprefix("i")
    return f"{spelled(key)} {expected}, got {first['input']!r}"
