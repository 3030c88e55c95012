"""What a measurement is made of: one TOML file, read safely and checked once."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from prefetch_runtime.config import MAX_BUDGET_MIB, PREDICTORS, ConfigError
from prefetch_runtime.policies import HOST_POLICY_NAMES, POLICY_NAMES

MAX_FILE_BYTES = 64 << 10
MAX_DOTS = 64
"""In a line of a file: Python's parser takes time by the square of a dotted key's length."""

BASELINES = ("uva", "uva-all", "offloader", "resident", "resident-pieces", "resident-eager")
"""vLLM alone; see `docs/benchmarks.md`."""
SIZED_BASELINES = ("uva", "offloader")
MODES = ("eager", "segmented", "full")
ROUTINGS = ("model", "calibrated", "uniform")
"""Who routes: the model, or a generated trace; else the path of a trace."""

Positive = Annotated[int, Field(ge=1, le=1 << 20)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine by name: a baseline, or a mode with what comes on top, as `full+next_gate`."""

    name: str
    base: str
    predictor: str = "none"
    policy: str = "lru"
    metrics: bool = False

    @property
    def is_cache(self) -> bool:
        """Whether it is ours."""
        return self.base in MODES

    @property
    def has_graphs(self) -> bool:
        """Whether it decodes as CUDA graphs, where there is CUDA."""
        return self.base not in ("eager", "resident-eager")

    @property
    def sized(self) -> bool:
        """Whether it comes with numbers of slots."""
        return self.base in (*MODES, *SIZED_BASELINES)


def parse_engine(name: str) -> Engine:
    """An engine such as `uva`, `eager+lfru` or `full+next_gate+metrics`.

    Raises:
        ConfigError: an unknown word in it; suggests the nearest.
    """
    base, *extras = name.split("+")
    bases = (*BASELINES, *MODES)
    policies = (*POLICY_NAMES, *HOST_POLICY_NAMES)
    if base not in bases:
        raise ConfigError(f"engines: unknown engine {base!r}; {_suggest(base, bases)}")
    found: dict[str, Any] = {}
    for extra in extras:
        if base in BASELINES:
            raise ConfigError(f"engines: {name!r}: only {', '.join(MODES)} take a {extra!r}")
        if extra == "metrics":
            found["metrics"] = True
        elif extra in PREDICTORS:
            found["predictor"] = extra
        elif extra in policies:
            found["policy"] = extra
        else:
            known = ("metrics", *PREDICTORS, *policies)
            raise ConfigError(f"engines: {name!r}: unknown {extra!r}; {_suggest(extra, known)}")
    return Engine(name, base, **found)


def _suggest(word: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(known)}"


class Server(BaseModel):
    """A running OpenAI-compatible server that is measured with the same lengths and batches."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=40)
    url: str = Field(pattern=r"^https?://[^\s]+$", max_length=500)
    model: str = Field(min_length=1, max_length=500)
    """The name under which the server serves it."""
    tokenizer: str | None = None
    """A folder or hub name; None: that of the model behind `model`, where the server tells, else of
    `model`."""


class BenchConfig(BaseModel):
    """A measurement. Build it with `from_mapping`, which words its errors for users."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str = Field(min_length=1, max_length=1000)
    """A named shape (random weights), a folder, or a name on the hub."""
    layers: Positive | None = None
    """Cut a named shape to so many layers."""
    engines: list[str] = ["resident", "uva", "offloader", "eager", "segmented", "full"]
    """`resident`, `resident-pieces`, `resident-eager`, `uva`, `uva-all` and `offloader` are vLLM
    alone; a mode may be followed by a predictor, a policy and `metrics`, as in
    `full+next_gate`."""
    slots: list[int | str] = ["25%", "50%", "100%"]
    """Experts of each layer on the device: numbers or shares."""
    slots_of: dict[str, list[int | str]] = {}
    """The same for single engines, by name, where they differ."""
    batches: list[Positive] = [1, 2, 4, 8, 16, 32]
    """Sequences decoded together."""
    routing: str = "model"
    """`model`, `calibrated`, `uniform`, or the path of a trace; the same for every engine."""
    prompt_tokens: Positive = 256
    """Tokens of every prompt."""
    prompt_file: str | None = None
    """Text that prompts are cut from; None: made-up tokens."""
    new_tokens: Positive = 64
    """Decode steps that are timed, after `warm` steps that are not."""
    warm: Annotated[int, Field(ge=0, le=10_000)] = 8
    """Decode steps before the timed ones."""
    repeats: Positive = 2
    """Times that a batch is sent; the figures are over all of them."""
    seconds_per_batch: Seconds = 20.0
    """After that, a batch's timed steps are cut short (never below eight)."""
    limit_s: Seconds = 300.0
    """Time limit of a case: one engine with one number of slots, loading included."""
    limits_s: dict[str, Seconds] = {}
    """The same by the name of an engine."""
    side_by_side: Annotated[int, Field(ge=1, le=32)] = 1
    """So many cases load at once, all held in memory, and are then timed one at a time."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """As of vLLM."""
    compile: bool = True
    """Whether engines with graphs are compiled by torch, too (never on a CPU)."""
    max_num_batched_tokens: Positive = 2048
    """As of vLLM: prompts are cut into steps of so many tokens."""
    attention_backend: str | None = None
    """As of vLLM."""
    moe_backend: str | None = None
    """As of vLLM."""
    staging_slots: Annotated[int, Field(ge=2, le=1024)] | Literal["auto"] = "auto"
    """As of the expert cache."""
    prefetch_budget_mib: Annotated[float, Field(ge=0, le=MAX_BUDGET_MIB)] | Literal["auto"] = "auto"
    """As of the expert cache."""
    seed: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Of generated routing and of a server's prompts."""
    servers: list[Server] = []
    """Running servers: `name`, `url`, `model` and, where the server does not tell, `tokenizer`."""

    @model_validator(mode="after")
    def _check(self) -> "BenchConfig":
        if not self.engines and not self.servers:
            raise ValueError("engines: name at least one engine, or a server under servers")
        for name, values in (
            ("engines", self.engines),
            ("slots", self.slots),
            ("batches", self.batches),
        ):
            if len(set(map(str, values))) != len(values):
                raise ValueError(f"{name}: something is named twice in {values}")
        if not self.batches:
            raise ValueError("batches: name at least one batch size")
        for batch in self.batches:
            if batch > 1024:
                raise ValueError(f"batches: {batch} is more than 1024 sequences")
        names = [parse_engine(name).name for name in self.engines]
        for name in self.limits_s:
            if name not in names and name not in BASELINES and name not in MODES:
                raise ValueError(
                    f"limits_s: unknown engine {name!r}; {_suggest(name, (*BASELINES, *MODES))}"
                )
        for name in self.slots_of:
            if not parse_engine(name).sized:
                raise ValueError(f"slots_of: {name!r} has no slots to choose; leave it out there")
        for slots in (*self.slots, *(s for of in self.slots_of.values() for s in of)):
            if not (isinstance(slots, int) and slots > 0) and not _share(slots):
                raise ValueError(
                    f"slots: {slots!r} is neither a number of experts nor a share such as '25%'"
                )
        servers = [server.name for server in self.servers]
        if len(set(servers)) != len(servers):
            raise ValueError("servers: two have the same name")
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "BenchConfig":
        """The settings in a mapping. Raises ConfigError with the key and what it may be."""
        unknown = [key for key in values if key not in cls.model_fields]
        if unknown:
            known = tuple(cls.model_fields)
            raise ConfigError(f"unknown setting {unknown[0]!r}; {_suggest(str(unknown[0]), known)}")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(_worded(error)) from None

    def limit_of(self, engine: Engine) -> float:
        """Time limit of the engine's cases, in seconds."""
        return self.limits_s.get(engine.name, self.limits_s.get(engine.base, self.limit_s))


_UNIONS = ("prefetch_budget_mib", "slots", "slots_of", "staging_slots")
"""Settings of more than one type: of each, pydantic says in an error of its own why it is not."""
_NOT_OF_A_SIZE = "must be a number of experts or a share such as '25%'"


def _worded(error: ValidationError) -> str:
    """What is wrong with the first setting that is, as it stands in a file."""
    errors: list[Any] = error.errors()
    if not errors[0]["loc"]:  # raised by our own check: already worded
        return str(errors[0]["msg"]).removeprefix("Value error, ")
    where = _place(errors[0])
    reasons = list(dict.fromkeys(_reason(one) for one in errors if _place(one) == where))
    if where[0] in ("slots", "slots_of") and type(where[-1]) is int:
        reasons = [_NOT_OF_A_SIZE]
    alternatives = [reason.removeprefix("must be ") for reason in reasons[1:]]
    text = f"{_spelled(where)} {' or '.join([reasons[0], *alternatives])}"
    if errors[0]["type"] in ("missing", "extra_forbidden"):
        return text
    return f"{text}, got {_shown(errors[0]['input'])}"


def _place(error: Any) -> tuple[str | int, ...]:
    """Key, and keys or numbers within it, without the type that was tried."""
    loc: tuple[str | int, ...] = error["loc"]
    is_type = re.fullmatch(r"(constrained-)?(int|float|str)|literal\[.*\]", str(loc[-1]))
    return loc[:-1] if loc[0] in _UNIONS and type(loc[-1]) is str and is_type else loc


def _spelled(where: tuple[str | int, ...]) -> str:
    """A place as `limits_s.full:`, `batches: value 2` or `servers: url of server 1`."""
    key, *rest = where
    if key == "servers" and rest:
        server = f"server {int(rest[0]) + 1}"
        return f"servers: {rest[1]} of {server}" if len(rest) > 1 else f"servers: {server}"
    number = f" value {int(rest.pop()) + 1}" if rest and type(rest[-1]) is int else ""
    return f"{'.'.join(map(str, (key, *rest)))}:{number}"


def _reason(error: Any) -> str:
    """What a value must be, in the words of a TOML file."""
    limits = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"must be at least {_number(limits['ge'])}"
        case "less_than_equal":
            return f"must be at most {_number(limits['le'])}"
        case "greater_than":
            return f"must be more than {_number(limits['gt'])}"
        case "int_type" | "int_from_float":
            return "must be a whole number"
        case "float_type":
            return "must be a number"
        case "finite_number":
            return "must be a finite number"
        case "string_type":
            return "must be text in quotes"
        case "string_too_short":
            return "must not be empty"
        case "string_too_long":
            return f"must be at most {limits['max_length']} characters long"
        case "string_pattern_mismatch":
            return "must look like http://host:port"
        case "bool_type":
            return "must be true or false"
        case "list_type":
            return "must be a list in [ ]"
        case "dict_type" | "model_type":
            return "must be a table, a line `name = value` for each"
        case "literal_error":
            return f"must be {limits['expected']}"
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return f"is no setting there; {_suggest(str(error['loc'][-1]), _OF_A_SERVER)}"
    return str(error["msg"])


def _number(limit: float) -> str:
    return str(int(limit) if limit == int(limit) else limit)


_OF_A_SERVER = tuple(Server.model_fields)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)[:80]


def load_config_file(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, not yet checked.

    Raises:
        ConfigError: it cannot be read, is larger than 64 KiB, is no TOML, or has keys of a depth
            that no setting has.
    """
    try:
        if not path.is_file():
            hint = "" if path.suffix == ".toml" else "; a model is given by --model"
            raise ConfigError(f"there is no configuration file {str(path)!r}{hint}")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 10} KiB: no configuration")
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.split("\n"), 1):
            if line.count(".") > MAX_DOTS and not line.lstrip().startswith("#"):
                raise ConfigError(
                    f"{path}: line {number} has more than {MAX_DOTS} dots, and no setting is so "
                    "deep; write each setting as `name = value`, engines below it as `name.engine`"
                )
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid TOML: {str(error)[:200]}") from None
    if _has_huge_number(values):  # Python could not even show it
        raise ConfigError(f"{path} has a whole number of more than 64 bits, which TOML does not")
    return values


def _has_huge_number(values: object) -> bool:
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, int) and value.bit_length() > 63:
            return True
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
    return False


def _share(slots: int | str) -> float | None:
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,3})?)%", slots) if isinstance(slots, str) else None
    share = float(match[1]) / 100 if match else 0.0
    return share if 0 < share <= 1 else None


def slot_counts(slots: list[int | str], *, num_experts: int, top_k: int) -> list[int]:
    """Experts per layer for each of the settings, without repeats, in their order.

    Raises:
        ConfigError: more than the model has, or fewer than a token needs.
    """
    counts: list[int] = []
    for asked in slots:
        share = _share(asked)
        count = asked if isinstance(asked, int) else round((share or 0) * num_experts)
        if not top_k <= count <= num_experts:
            size = f"{count}" if isinstance(asked, int) else f"{asked} are {count}"
            raise ConfigError(
                f"slots: {size} of {num_experts} experts, but a token needs {top_k}; "
                f"choose between {top_k} and {num_experts}"
            )
        if count not in counts:
            counts.append(count)
    return counts


QUICK: Mapping[str, Any] = {
    "model": "models/tiny-moe",
    "engines": ["resident", "uva", "eager", "eager+next_gate", "segmented", "full"],
    "slots": [8],
    "batches": [1, 2],
    "prompt_tokens": 16,
    "new_tokens": 12,
    "warm": 2,
    "repeats": 1,
    "limit_s": 90.0,
}
"""Does every part of the harness still run? Its numbers mean nothing."""
