"""Settings of the cache: what is accepted, and the words of every refusal."""

import json
import re
from typing import Any

import pydantic
import pytest

from prefetch_runtime.config import (
    ADDITIONAL_CONFIG_KEY,
    CLI_SPELLING,
    POLICIES,
    ConfigError,
    PrefetchConfig,
    spelled,
)
from prefetch_runtime.policies import HOST_POLICY_NAMES, POLICY_NAMES

SLOTS = "'slots_per_layer' (--moe-expert-cache-size)"
GIB = "'expert_cache_gib' (--moe-expert-cache-gib)"


def _refused(settings: object, *parts: str) -> None:
    with pytest.raises(ConfigError) as error:
        PrefetchConfig.from_mapping(settings)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert "pydantic" not in str(error.value)


class TestAccepted:
    @pytest.mark.parametrize("settings", [None, {}, {"slots_per_layer": 0}])
    def test_nothing_or_zero_slots_is_off(self, settings: object) -> None:
        assert not PrefetchConfig.from_mapping(settings).enabled

    @pytest.mark.parametrize(
        "settings",
        [
            {"slots_per_layer": 8},
            {"slots_per_layer": "auto"},
            {"expert_cache_gib": 4},
            {"expert_cache_gib": 0.5},
            {"expert_cache_gib": 0.5, "slots_per_layer": 0},
        ],
        ids=json.dumps,
    )
    def test_a_size_switches_the_cache_on(self, settings: dict[str, Any]) -> None:
        config = PrefetchConfig.from_mapping(settings)
        assert config.enabled
        for key, value in settings.items():
            assert getattr(config, key) == value

    def test_every_setting_that_this_version_has_can_be_given(self) -> None:
        settings = {
            "slots_per_layer": 8,
            "mode": "eager",
            "policy": "lfru",
            "predictor": "none",
            "predictor_widen": 16,
            "predictor_table": "a.npz",
            "save_table": "b.npz",
            "prefetch_budget_mib": 0.0,
            "staging_slots": 2,
            "metrics": True,
        }
        given = PrefetchConfig.from_mapping(settings).model_dump()
        assert {key: given[key] for key in settings} == settings

    def test_every_policy_that_exists_can_be_chosen(self) -> None:
        assert POLICIES == POLICY_NAMES + HOST_POLICY_NAMES

    def test_settings_cannot_be_changed_afterwards(self) -> None:
        config = PrefetchConfig.from_mapping({"slots_per_layer": 8})
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            config.slots_per_layer = 9


class TestRefused:
    @pytest.mark.parametrize(
        "value", [-1, 8.0, "8", "many", True, None, [8]], ids=lambda value: json.dumps(value)
    )
    def test_slots_that_are_no_number_of_experts(self, value: object) -> None:
        _refused({"slots_per_layer": value}, SLOTS, f"got {value!r}")

    @pytest.mark.parametrize("value", [-1, 0, "4", float("inf"), float("nan"), 1e308], ids=str)
    def test_a_size_that_is_no_amount(self, value: object) -> None:
        _refused({"expert_cache_gib": value}, GIB, "should be", f"got {value!r}")

    def test_both_sizes(self) -> None:
        _refused(
            {"slots_per_layer": 8, "expert_cache_gib": 4.0},
            f"{SLOTS} and {GIB} both size the cache; give one of them",
        )
        _refused({"slots_per_layer": "auto", "expert_cache_gib": 4.0}, "both size the cache")

    def test_a_misspelt_key_names_the_right_one_twice(self) -> None:
        _refused(
            {"slots_per_layers": 8},
            f"unknown setting 'slots_per_layers' in 'prefetch_runtime'; did you mean {SLOTS}?",
        )

    def test_an_unknown_key_lists_the_known_ones(self) -> None:
        _refused(
            {"colour": 1}, "unknown setting 'colour'", "known are slots_per_layer, expert_cache"
        )

    @pytest.mark.parametrize("settings", [8, "slots_per_layer=8", ["slots_per_layer", 8]], ids=str)
    def test_settings_that_are_no_object(self, settings: object) -> None:
        _refused(settings, "must be an object such as", f"got {settings!r}")

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("mode", "fast", "must be one of auto, full, segmented, eager, got 'fast'"),
            (
                "policy",
                "lur",
                f"is 'lur', choose one of {', '.join(POLICIES)}; did you mean 'lru'?",
            ),
            ("policy", "random", "is 'random', choose one of lru, lfru"),
            ("policy", 3, "should be a valid string, got 3"),
            ("predictor", "oracle", "is 'oracle', choose one of "),
            ("predictor_table", "", "at least 1 character, got ''"),
            ("save_table", 8, "valid string, got 8"),
            ("predictor_widen", 0, "should be greater than or equal to 1, got 0"),
            ("predictor_widen", 17, "should be less than or equal to 16, got 17"),
            ("predictor_widen", 1.5, "got 1.5"),
            ("prefetch_budget_mib", -0.5, "must be 'auto' or a number of MiB from 0 to 1048576"),
            ("prefetch_budget_mib", float("nan"), "from 0 to 1048576, got nan"),
            ("prefetch_budget_mib", float("inf"), "from 0 to 1048576, got inf"),
            ("prefetch_budget_mib", "lots", "must be 'auto' or a number of MiB, got 'lots'"),
            ("staging_slots", 1, "must be 'auto' or a number of experts from 2 to 1024, got 1"),
            ("staging_slots", -3, "from 2 to 1024, got -3"),
            ("staging_slots", 10**6, "from 2 to 1024, got 1000000"),
            ("staging_slots", "few", "must be 'auto' or a whole number of experts, got 'few'"),
            ("staging_slots", 2.5, "must be 'auto' or a whole number of experts, got 2.5"),
            ("metrics", "yes", "should be a valid boolean, got 'yes'"),
        ],
    )
    def test_a_value_out_of_range_names_key_option_and_value(
        self, key: str, value: object, words: str
    ) -> None:
        _refused({"slots_per_layer": 8, key: value}, f"'{key}' ({CLI_SPELLING[key]}) ", words)


class TestAdditionalConfig:
    def test_the_settings_stand_under_our_key(self) -> None:
        config = PrefetchConfig.from_additional_config(
            {"other": {"slots_per_layer": 99}, ADDITIONAL_CONFIG_KEY: {"slots_per_layer": 8}}
        )
        assert config.slots_per_layer == 8

    @pytest.mark.parametrize("additional", [None, {}, {"other": 1}, object()], ids=repr)
    def test_without_our_key_the_cache_is_off(self, additional: object) -> None:
        assert not PrefetchConfig.from_additional_config(additional).enabled

    @pytest.mark.parametrize("key", ["prefetch-runtime", "prefetch_runtme", "prefetchruntime"])
    def test_our_key_misspelt_is_not_taken_for_anothers(self, key: str) -> None:
        with pytest.raises(
            ConfigError,
            match=re.escape(f"unknown key '{key}' in --additional-config; did you mean"),
        ):
            PrefetchConfig.from_additional_config({key: {"slots_per_layer": 8}})

    def test_keys_that_are_no_text_are_anothers(self) -> None:
        assert not PrefetchConfig.from_additional_config({1: 2}).enabled


def test_every_setting_has_an_option() -> None:
    assert set(CLI_SPELLING) == set(PrefetchConfig.model_fields)
    assert spelled("slots_per_layer") == SLOTS
    assert spelled("unheard_of") == "'unheard_of'"
