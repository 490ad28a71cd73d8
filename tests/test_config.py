"""`CompilationConfig`: values and kinds of fields, contradictions, and the environment."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgtool.config import FIELDS, CompilationConfig, parse_field, resolve_capture_sizes, resolve_compile_sizes
from cgtool.config_values import CompilationLevel, CUDAGraphMode
from cgtool.errors import ConfigError
from cgtool.host import code_variables, environment
from cgtool.plan.grammar import canonical_json

#: Each field: its kind, and a non-default value in canonical form.
FIELDS_BY_NAME = {
    "level": ("key", CompilationLevel.DYNAMO_ONCE),
    "splitting_ops": ("key", ("toy::attn",)),
    "use_inductor": ("key", False),
    "adaptor": ("key", "inductor"),
    "inductor_compile_config": ("key", {"max_autotune": True}),
    "compile_sizes": ("coverage", (1, 8)),
    "compile_ranges": ("coverage", ((1, 16), (17, 64))),
    "size_dim": ("coverage", "num_tokens"),
    "use_cudagraph": ("runtime", False),
    "full_cuda_graph": ("runtime", True),
    "cudagraph_mode": ("runtime", CUDAGraphMode.FULL),
    "cudagraph_capture_sizes": ("runtime", (1, 2)),
    "cuda_graph_sizes": ("runtime", (4, 8)),
    "cudagraph_copy_inputs": ("runtime", True),
    "enforce_eager": ("runtime", True),
    "disable_cache": ("runtime", True),
    "jobs": ("runtime", 4),
    "executor": ("runtime", "dask://10.0.0.1:8786"),
    "compile_timeout": ("runtime", 90.5),
    "proof": ("runtime", False),
    "cache_dir": ("runtime", "/x"),
    "debug_dump_path": ("runtime", "/y"),
    "recheck": ("runtime", "call"),
    "trusted_keys": ("runtime", ("/k", "keys")),
    "allow_shared_cache": ("runtime", True),
    "remote": ("runtime", ("s3://models/cgtool", "file:///x")),
    "remote_readonly": ("runtime", True),
    "remote_required": ("runtime", True),
}
KINDS = {name: kind for name, (kind, _) in FIELDS_BY_NAME.items()}
OTHERS = {name: other for name, (_, other) in FIELDS_BY_NAME.items()}


def test_every_field_has_the_expected_kind():
    assert {name: spec.kind for name, spec in FIELDS.items()} == KINDS
    assert {field.name for field in dataclasses.fields(CompilationConfig)} == set(KINDS)


def test_every_field_is_documented_with_its_kind_and_default():
    documented = inspect.getdoc(CompilationConfig) or ""  # Python 3.13 removes the indentation
    for name, kind in KINDS.items():
        words, after = documented.split(f"\n    {name}: ")[1].split("Kind: ", 1)
        assert after.startswith(f"{kind}."), name
        assert "default" in words, name


@pytest.mark.parametrize("name", KINDS)
def test_only_key_fields_change_the_key(name):
    plain = CompilationConfig()
    changed = CompilationConfig(**{name: OTHERS[name]})
    assert getattr(changed, name) == OTHERS[name] != getattr(plain, name)
    assert (plain.key_fields() != changed.key_fields()) == (KINDS[name] == "key")


@pytest.mark.parametrize("name", KINDS)
def test_a_configuration_round_trips_through_json(name):
    config = CompilationConfig(**{name: OTHERS[name]})
    assert CompilationConfig.from_mapping(json.loads(canonical_json(config.to_json()))) == config


def test_the_default_is_piecewise_with_aot_inductor():
    config = CompilationConfig()
    assert (config.level, config.adaptor, config.effective_level) == (3, "aot_inductor", 3)
    assert resolve_compile_sizes(config) == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"use_inductor": False}, {"adaptor": "eager"}, id="no inductor is the eager adaptor"),
        pytest.param({"level": "piecewise"}, {"level": 3}, id="a level by name"),
        pytest.param({"splitting_ops": ["a::b", "c::d"]}, {"splitting_ops": ["c::d", "a::b"]}, id="order of ops"),
        pytest.param(
            {"inductor_compile_config": {"a": 1, "b": (1, 2)}},
            {"inductor_compile_config": {"b": [1, 2], "a": 1}},
            id="order of options",
        ),
    ],
)
def test_equivalent_configurations_have_the_same_key(one, other):
    assert CompilationConfig(**one).key_fields() == CompilationConfig(**other).key_fields()


def test_values_are_normalized():
    config = CompilationConfig(
        compile_sizes=[8, {"seq": 4, "batch": 2}, 1, 8, {"batch": 2, "seq": 4}, "cudagraph_capture_sizes"],
        compile_ranges=[[17, 64], (1, 16)],
        splitting_ops=["b::x", "a.y", "b::x"],
        cudagraph_mode="full_and_piecewise",
        cache_dir=Path("/x"),
    )
    assert config.compile_sizes == (1, 8, "cudagraph_capture_sizes", {"batch": 2, "seq": 4})
    assert config.compile_ranges == ((1, 16), (17, 64))
    assert config.splitting_ops == ("b::x", "a.y")
    assert config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert config.cache_dir == "/x"


def test_the_callers_mapping_is_copied():
    options = {"triton": {"cudagraphs": False}}
    config = CompilationConfig(inductor_compile_config=options)
    options["triton"]["cudagraphs"] = True
    assert config.inductor_compile_config == {"triton": {"cudagraphs": False}}


def test_equal_configurations_have_equal_hashes():
    one = CompilationConfig(compile_sizes=[1, {"batch": 8}], inductor_compile_config={"a": 1})
    assert hash(one) == hash(CompilationConfig.from_mapping(one.to_json()))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("level", 4, r"levels are 0 \(NO_COMPILATION\)"),
        ("level", True, "levels are"),
        ("level", "3", "levels are"),
        ("level", 3.0, "levels are"),
        ("use_inductor", 1, "true or false"),
        ("splitting_ops", "toy::attn", "a list of names of ops"),
        ("splitting_ops", ["attn"], "'attn' is none of these"),
        ("splitting_ops", ["a::b; import os"], "is none of these"),
        ("compile_sizes", [0], "sizes are positive integers.* 0 is none"),
        ("compile_sizes", [True], "True is none"),
        ("compile_sizes", [1.0], r"1\.0 is none"),
        ("compile_sizes", ["8"], "'8' is none"),
        ("compile_sizes", [{}], "{} is none"),
        ("compile_sizes", [{"batch": 0}], "is none"),
        ("compile_sizes", 8, "a list of positive integers"),
        ("compile_ranges", [[1, 16], [16, 32]], r"\[1, 16\] and \[16, 32\] do"),
        ("compile_ranges", [[8, 8]], "compile_sizes"),
        ("compile_ranges", [[0, 8]], "is not one"),
        ("compile_ranges", [[9, 8]], "is not one"),
        ("compile_ranges", [[1, 2, 3]], "is not one"),
        ("compile_ranges", None, "a list"),
        ("size_dim", "a b", "name of a dynamic dimension"),
        ("adaptor", "inductr", "nearest is inductor"),
        ("inductor_compile_config", [], "map names"),
        ("inductor_compile_config", {"a": object()}, "not JSON serializable"),
        ("inductor_compile_config", {"a": float("nan")}, "JSON values"),
        ("inductor_compile_config", {"a": {1: 2}}, "1 is not"),
        ("cudagraph_mode", "PIECE", "modes are NONE, PIECEWISE"),
        ("cudagraph_mode", True, "modes are"),
        ("cudagraph_mode", 1.0, "modes are"),
        ("cudagraph_capture_sizes", [], "one or more"),
        ("cuda_graph_sizes", [], "one or more"),
        ("cuda_graph_sizes", None, "one or more"),
        ("cuda_graph_sizes", [8, 8], "listed twice"),
        ("cache_dir", 3, "a path"),
        ("cache_dir", "a\0b", "zero byte"),
        ("trusted_keys", "key.pub", "a list of paths"),
        ("trusted_keys", ["key.pub", ""], "none of which is empty"),
    ],
)
def test_an_invalid_value_is_an_error_that_names_the_field(name, value, says):
    with pytest.raises(ConfigError, match=says) as caught:
        CompilationConfig(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}: ")
    assert (caught.value.path, caught.value.exit_code) == (name, 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_inductor": False, "adaptor": "inductor"}, "use the adaptor 'eager'"),
        ({"level": 2, "splitting_ops": ["a::b"]}, "use level 3"),
        ({"use_cudagraph": False, "cudagraph_mode": "FULL"}, "leave cudagraph_mode out"),
        ({"use_cudagraph": False, "compile_sizes": ["cudagraph_capture_sizes"]}, "write the sizes"),
        ({"use_cudagraph": False, "cudagraph_copy_inputs": True}, "leave it out"),
        ({"cudagraph_mode": "FULL", "cudagraph_copy_inputs": True}, "leave it out"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        CompilationConfig(**fields)
    for name in fields:  # each alone is valid
        CompilationConfig(**{name: fields[name]})


def test_the_error_for_an_unknown_field_suggests_the_nearest():
    with pytest.raises(ConfigError, match="no configuration field 'compile-size'; the nearest is 'compile_sizes'"):
        CompilationConfig.from_mapping({"compile-size": [1]})


@pytest.mark.parametrize(
    ("level", "splitting_ops", "adaptor"),
    [(0, ("a::b",), "inductor"), (1, (), "eager"), (2, (), "inductor"), (3, ("a::b",), "inductor")],
)
def test_leveled_sets_the_fields_that_the_level_implies(level, splitting_ops, adaptor):
    given = () if level == 2 else ("a::b",)
    config = CompilationConfig(level=level, splitting_ops=given, adaptor="inductor").leveled()
    assert (config.splitting_ops, config.adaptor) == (splitting_ops, adaptor)


def test_replace_checks_values_and_selects_the_adaptor_again():
    assert CompilationConfig().replace(use_inductor=False).adaptor == "eager"
    with pytest.raises(ConfigError, match="nearest is 'level'"):
        CompilationConfig().replace(levels=2)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (1, 2, 4, 8, *range(16, 513, 16))),
        ({"cuda_graph_sizes": [20]}, (1, 2, 4, 8, 16)),
        ({"cuda_graph_sizes": [6]}, (1, 2, 4)),
        ({"cuda_graph_sizes": [6, 3]}, (3, 6)),
        ({"cudagraph_capture_sizes": [5], "cuda_graph_sizes": [6, 3]}, (5,)),
        ({"use_cudagraph": False}, ()),
    ],
)
def test_capture_sizes_follow_the_pattern_unless_set(fields, sizes):
    assert resolve_capture_sizes(CompilationConfig(**fields)) == sizes


def test_compile_sizes_can_refer_to_the_capture_sizes():
    config = CompilationConfig(
        compile_sizes=[{"batch": 2, "seq": 4}, "cudagraph_capture_sizes", 3, 4], cuda_graph_sizes=[5]
    )
    assert resolve_compile_sizes(config) == (1, 2, 3, 4, {"batch": 2, "seq": 4})


def test_enforce_eager_overrules_the_level():
    config = CompilationConfig(enforce_eager=True)
    assert config.effective_level is CompilationLevel.NO_COMPILATION
    assert config.asked_cudagraph_mode is CUDAGraphMode.NONE


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("compile_sizes", "1, 8,cudagraph_capture_sizes", (1, 8, "cudagraph_capture_sizes")),
        ("compile_sizes", "batch=4:seq=128,8", (8, {"batch": 4, "seq": 128})),
        ("compile_sizes", '[1, {"batch": 4}]', (1, {"batch": 4})),
        ("compile_sizes", "none", None),
        ("compile_ranges", "1-16,17-64", ((1, 16), (17, 64))),
        ("compile_ranges", "[[1, 16]]", ((1, 16),)),
        ("splitting_ops", "a::b,c.d", ("a::b", "c.d")),
        ("splitting_ops", "", ()),
        ("level", " 2 ", CompilationLevel.DYNAMO_ONCE),
        ("level", "piecewise", CompilationLevel.PIECEWISE),
        ("use_cudagraph", "Off", False),
        ("full_cuda_graph", "on", True),
        ("full_cuda_graph", "", None),
        ("enforce_eager", "1", True),
        ("cudagraph_mode", "none", CUDAGraphMode.NONE),
        ("cudagraph_mode", "", None),
        ("cudagraph_mode", "[2, 1]", CUDAGraphMode.FULL_AND_PIECEWISE),
        ("inductor_compile_config", '{"max_autotune": true}', {"max_autotune": True}),
        ("size_dim", "num_tokens", "num_tokens"),
        ("jobs", "0", 0),
        ("jobs", "none", None),
        ("executor", " ray://head:10001 ", "ray://head:10001"),
        ("executor", "", ""),
        ("compile_timeout", "90.5", 90.5),
        ("compile_timeout", "", None),
        ("proof", "no", False),
        ("cache_dir", " /a b", " /a b"),
    ],
)
def test_a_field_is_parsed_from_text(name, text, value):
    assert parse_field(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compile_sizes", "1;8"),
        ("compile_sizes", "-1"),
        ("compile_sizes", "batch=4:batch=5"),
        ("compile_sizes", "[1,"),
        ("compile_sizes", "[" * 100_000),
        ("compile_ranges", "1-2-3"),
        ("compile_ranges", "5"),
        ("use_cudagraph", "maybe"),
        ("inductor_compile_config", '{"a": 1, "a": 2}'),
        ("size_dim", "8"),
        ("jobs", "-1"),
        ("jobs", "many"),
        ("executor", "//10.0.0.1"),
        ("executor", "dask://a b"),
        ("compile_timeout", "0"),
        ("compile_timeout", "1e999"),
    ],
)
def test_invalid_text_is_refused(name, text):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        parse_field(name, text)


@given(
    st.sampled_from(sorted(FIELDS)), st.text() | st.sampled_from(["{}", "[[]]", "[null]", "1e9", "=", "-", "{", ","])
)
def test_any_text_gives_a_value_or_a_config_error(name, text):
    try:
        value = parse_field(name, text)
    except ConfigError as error:
        message = str(error)
        assert message.startswith(f"{name} is "), message
    else:
        assert FIELDS[name].check(value) == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 600) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), json_values, max_size=2))
def test_any_mapping_gives_a_configuration_or_a_config_error(values):
    try:
        config = CompilationConfig.from_mapping(values)
    except ConfigError as error:
        assert error.path in FIELDS  # noqa: PT017  both outcomes are valid
    else:
        assert CompilationConfig.from_mapping(config.to_json()) == config


MODES = {
    "NONE": ("NONE", "NONE", "NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE", "PIECEWISE", "NONE"),
    "FULL": ("FULL", "FULL", "FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE", "FULL", "FULL_DECODE_ONLY"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"),
}


@pytest.mark.parametrize("name", MODES)
def test_helpers_of_a_mode(name):
    mode = CUDAGraphMode[name]
    decode, mixed, highest, without = MODES[name]
    assert mode.decode_mode().name == decode
    assert mode.mixed_mode().name == mixed
    assert mode.max_cudagraph_mode().name == highest
    assert mode.without_piecewise().name == without
    assert mode.separate_routine() == (decode != mixed)
    assert mode.has_full_cudagraphs() == ("FULL" in (decode, mixed))
    assert mode.requires_piecewise_compilation() == ("PIECEWISE" in (decode, mixed))
    assert mode.has_piecewise_cudagraphs() == mode.requires_piecewise_compilation()
    assert mode.is_valid_runtime_mode() == (mode in CUDAGraphMode.valid_runtime_modes())
    assert {m.name for m in CUDAGraphMode.valid_runtime_modes() if mode.has_mode(m)} == {decode, mixed}


def test_modes_have_the_values_of_vllm():
    assert {mode.name: mode.value for mode in CUDAGraphMode} == {
        "NONE": 0,
        "PIECEWISE": 1,
        "FULL": 2,
        "FULL_DECODE_ONLY": (2, 0),
        "FULL_AND_PIECEWISE": (2, 1),
    }


def test_has_mode_refuses_a_pair():
    with pytest.raises(ValueError, match=r"FULL_DECODE_ONLY is a pair of modes. Pass one of FULL, NONE, PIECEWISE"):
        CUDAGraphMode.FULL.has_mode(CUDAGraphMode.FULL_DECODE_ONLY)


def test_the_environment_is_read_on_every_call(monkeypatch):
    assert environment().cache_dir is None
    monkeypatch.setenv("CGTOOL_CACHE_DIR", "/c")
    assert environment().cache_dir == "/c"
    assert os.environ["CGTOOL_CACHE_DIR"] == "/c"


def test_an_empty_environment_gives_defaults():
    found = environment({"CGTOOL_CACHE_DIR": "", "CGTOOL_DISABLE_CACHE": "", "CXX": "", "RANK": ""})
    assert (found.cache_dir, found.disable_cache, found.cxx, found.rank) == (None, False, "", 0)
    assert code_variables({"CXX": "", "RANK": ""}) == {}
    assert (found.trusted_keys, found.allow_shared_cache) == ((), False)


@pytest.mark.parametrize(
    ("variables", "rank"), [({"RANK": "9", "LOCAL_RANK": "1"}, 9), ({"LOCAL_RANK": "1"}, 1), ({"RANK": "9"}, 9)]
)
def test_the_global_rank_takes_precedence_over_the_local_one(variables, rank):
    assert environment(variables).rank == rank


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "-1"}, "variable RANK is '-1'"),
        ({"LOCAL_RANK": "one"}, "variable LOCAL_RANK is 'one'"),
        ({"CGTOOL_DISABLE_CACHE": "perhaps"}, "variable CGTOOL_DISABLE_CACHE is 'perhaps'"),
        ({"CGTOOL_ALLOW_SHARED_CACHE": "perhaps"}, "variable CGTOOL_ALLOW_SHARED_CACHE is 'perhaps'"),
        *(({"CGTOOL_TRUSTED_KEYS": blank}, "CGTOOL_TRUSTED_KEYS is set but empty") for blank in ("", " ", ", ,")),
        ({"CGTOOL_TRUSTED_KEYS": "{}"}, "variable CGTOOL_TRUSTED_KEYS is '{}'"),
    ],
)
def test_an_error_names_the_invalid_variable(variables, says):
    with pytest.raises(ConfigError, match=says):
        environment(variables)


def test_variables_set_the_trust_policy():
    found = environment({"CGTOOL_TRUSTED_KEYS": "/etc/keys, ours.pub", "CGTOOL_ALLOW_SHARED_CACHE": "yes"})
    assert (found.trusted_keys, found.allow_shared_cache) == (("/etc/keys", "ours.pub"), True)


@pytest.mark.parametrize(("text", "off"), [("1", True), ("0", False), ("yes", True), ("FALSE", False)])
def test_a_variable_disables_the_cache(text, off):
    assert environment({"CGTOOL_DISABLE_CACHE": text}).disable_cache is off


@pytest.mark.parametrize(
    "name",
    [
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCHINDUCTOR_FUTURE_SWITCH",
        "TORCHDYNAMO_DISABLE",
        "TORCH_COMPILE_DISABLE",
        "TRITON_INTERPRET",
        "ATEN_CPU_CAPABILITY",
        "AOT_INDUCTOR_DEBUG_COMPILE",
        "TORCHINDUCTOR_CACHE_SDPA_CONSTRAINT",
    ],
)
def test_a_variable_that_may_change_code_is_kept(name):
    assert code_variables({name: "1"}) == {name: "1"}


def test_the_ptxas_of_torch_is_ignored(tmp_path):
    torchs_own = Path(importlib.util.find_spec("torch").origin).parent / "bin" / "ptxas"
    assert code_variables({"TRITON_PTXAS_PATH": str(torchs_own)}) == {}
    another = {"TRITON_PTXAS_PATH": str(tmp_path / "ptxas")}
    assert code_variables(another) == another


@pytest.mark.parametrize(
    "name",
    [
        "HOME",
        "PATH",
        "MASTER_PORT",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCH_LOGS",
        "TORCH_HOME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_REDIS_PORT",
        "TORCH_TRACE",
        "CUDA_VISIBLE_DEVICES",
    ],
)
def test_variables_of_paths_ports_and_logs_are_ignored(name):
    assert code_variables({name: "1"}) == {}


def test_a_configuration_is_created_from_variables():
    config = CompilationConfig.from_variables(
        {"CGTOOL_COMPILE_SIZES": "1,8", "CGTOOL_LEVEL": "2", "CGTOOL_ADAPTOR": ""}
    )
    assert config == CompilationConfig(compile_sizes=[1, 8], level=2)
