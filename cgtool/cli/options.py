"""Options that several commands share, and the parsers of their values.

Must not import torch. `cgtool.config` defines how the values of configuration fields are spelled. Grammar::

    pair = name "=" (JSON | any other text, taken as a string)

Repeating an option adds to its earlier values.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import logs
from cgtool.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cgtool.config import CompilationConfig
    from cgtool.toolkit.bundle.choose import Choice
    from cgtool.toolkit.mirror import Mirror
    from cgtool.toolkit.model_choice import ModelChoice

    Command = Callable[..., Any]


_REQUIRED = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<low>[0-9]{1,12})(?:-(?P<high>[0-9]{1,12}))?")


def output_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--json`, `--quiet`, `--verbose` and `--traceback`, and pass the command an `Output` made from them."""

    @click.option("--json", "as_json", is_flag=True, help="Print the report, or the error, as JSON on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr: no progress, no hints.")
    @click.option("-v", "--verbose", is_flag=True, help="Print log messages of cgtool and its libraries on stderr.")
    @click.option("--traceback", is_flag=True, help="Print the traceback of an error.")
    @functools.wraps(function)
    def command(*, as_json: bool, quiet: bool, verbose: bool, traceback: bool, **options: Any) -> int | None:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose are mutually exclusive. Give one of them.")
        output = Output(as_json=as_json, quiet=quiet, verbose=verbose, traceback=traceback)
        logs.configure(output)
        return function(output=output, **options)

    return command


def check_shapes(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return the value, one shape or several as text, if every shape parses."""
    from cgtool.plan.shapes import parse_shape  # imports msgspec, which `--help` does not need

    for text in (value,) if isinstance(value, str) else value or ():
        try:
            parse_shape(text)
        except ValueError as error:
            message = f"{text[:80]!r} is not a shape. Give general, a size (8), a range (2-64) or batch=4:seq=2-64."
            raise click.BadParameter(message, ctx=ctx, param=param) from error
    return value


def add_factory_arg(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Treat an option such as `--task` as `--arg` of the same name; `--arg` is parsed first."""
    name = str(param.name)
    if value is not None:
        if name in ctx.params["factory_args"]:
            message = f"--arg already sets the {name.replace('_', ' ')}. Give it once."
            raise click.BadParameter(message, ctx=ctx, param=param)
        ctx.params["factory_args"][name] = value


def parse_factory_args(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
    """Parse `--arg`: keyword arguments, each given once."""
    result: dict[str, Any] = {}
    for text in texts:
        name, value = _pair(text, ctx, param)
        if not name.isidentifier():
            message = f"{name!r} is not a valid argument name. Give one such as num_layers=4."
            raise click.BadParameter(message, ctx=ctx, param=param)
        if name in result:
            raise click.BadParameter(f"{name!r} is given twice. Give it once.", ctx=ctx, param=param)
        result[name] = value
    return result


def parse_required(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Parse `--require`: "num_tokens=1-512" or "num_tokens=7", each dimension once."""
    result: dict[str, tuple[int, int]] = {}
    for text in texts:
        match = _REQUIRED.fullmatch(text)
        if match is None:
            message = f"{text!r} is not a range of sizes. Give one such as num_tokens=1-512."
            raise click.BadParameter(message, ctx=ctx, param=param)
        name, low = match["name"], int(match["low"])
        if name in result:
            raise click.BadParameter(f"{name!r} is given twice. Give it once.", ctx=ctx, param=param)
        result[name] = low, int(match["high"] or low)
    return result


def parse_inductor_config(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any] | None:
    """Parse `--inductor-config`: JSON objects and name=value, later ones win; None if the option is absent."""
    if not texts:
        return None
    result: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            result.update(_json_object(text, ctx, param))
        else:
            name, value = _pair(text, ctx, param)
            result[name] = value
    return result


def wrap_in_list(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:  # noqa: ARG001 - click's signature
    """Accept a bare JSON object as a list of one: {"batch": 4} means [{"batch": 4}]."""
    return f"[{text}]" if text is not None and text.lstrip().startswith("{") else text


def _json_object(text: str, ctx: click.Context, param: click.Parameter) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        hint = "Quote it for the shell: '{\"max_autotune\": true}'."
        raise click.BadParameter(f"{text!r} is not valid JSON ({error}). {hint}", ctx=ctx, param=param) from error
    return dict(document)


def _pair(text: str, ctx: click.Context, param: click.Parameter) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        message = f"{text!r} is not name=value. Put an equals sign between the name and the value: name=4."
        raise click.BadParameter(message, ctx=ctx, param=param)
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _combined(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine decorators into one; `--help` lists the options in the given order."""

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


#: How MODEL is built.
build_options = _combined(
    click.option(
        "--arg",
        "factory_args",
        multiple=True,
        callback=parse_factory_args,
        is_eager=True,
        metavar="NAME=VALUE",
        help="Set a keyword argument of MODEL's factory, or a config field of hf:PATH. VALUE is JSON or a plain "
        "string. Repeatable.",
    ),
    click.option(
        "--task",
        callback=add_factory_arg,
        expose_value=False,
        metavar="TASK",
        help="Task head for hf:PATH: causal-lm, sequence-classification, ... Default: none, the base model.",
    ),
    click.option("--device", metavar="DEVICE", help="Device to build MODEL on: cpu, cuda, cuda:1."),
    click.option("--dtype", metavar="DTYPE", help="Default floating-point dtype of MODEL: float32, bfloat16."),
    click.option(
        "--pythonpath",
        multiple=True,
        metavar="DIR",
        help="Search this directory first for MODEL's modules. Repeatable.",
    ),
)
#: MODEL, and how it is built.
model_options = _combined(click.argument("model", metavar="MODEL"), build_options)

#: The key-value cache of hf:PATH. Not for commands that repeat the same call of MODEL, which would fill the cache.
cache_options = _combined(
    click.option(
        "--cache",
        type=click.Choice(["static"]),
        callback=add_factory_arg,
        expose_value=False,
        help="Build hf:PATH as generate() calls it: a causal-lm with a key-value cache of fixed length.",
    ),
    click.option(
        "--cache-length",
        type=click.IntRange(min=1),
        callback=add_factory_arg,
        expose_value=False,
        metavar="TOKENS",
        help="Length of that cache in tokens, prompt and answer. Default: the model's limit, at most 2048.",
    ),
)

#: The sizes that cgtool compiles for.
coverage_options = _combined(
    click.option(
        "--compile-sizes",
        callback=wrap_in_list,
        metavar="SIZES",
        help="Also compile for exactly these sizes: 1,8 or cudagraph_capture_sizes or batch=4:seq=128 or JSON.",
    ),
    click.option(
        "--compile-ranges",
        metavar="RANGES",
        help="Also compile for these inclusive ranges of sizes: 1-16,17-64.",
    ),
    click.option(
        "--size-dim", metavar="DIM", help="Dynamic dimension that plain sizes refer to, if there are several."
    ),
)

#: Any other field of the configuration.
config_option = click.option(
    "--compilation-config",
    metavar="JSON",
    help="Set any fields of CompilationConfig. Individual options take precedence.",
)

#: How cgtool compiles.
compiler_options = _combined(
    click.option(
        "--splitting-ops",
        metavar="OPS",
        help="Split the graph at these ops: ns::op, ns.op, torch.nn.functional.name. Default: known attention ops.",
    ),
    click.option(
        "--inductor-config",
        "inductor_compile_config",
        multiple=True,
        callback=parse_inductor_config,
        metavar="JSON|NAME=VALUE",
        help="Set options of Inductor. Repeatable.",
    ),
    config_option,
)

#: The entries that `export` and `push` send.
entries_options = _combined(
    click.argument("hashes", nargs=-1, metavar="[HASH]..."),
    click.option("--all", "everything", is_flag=True, help="Select all entries of the cache, of any model."),
    click.option(
        "--filter",
        "filters",
        multiple=True,
        metavar="CONDITION",
        help='Select entries that match, such as "model~llama" or "last_used<30d". Repeatable: all must match.',
    ),
    click.option(
        "--rank",
        "ranks",
        type=click.IntRange(min=0),
        multiple=True,
        metavar="N",
        help="Select only this rank. Repeatable.",
    ),
    click.option("--no-debug", is_flag=True, help="Leave out computation_graph.py and transformed_code.py."),
)
#: Who signs them.
sign_option = click.option(
    "--sign",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="KEY",
    help="Sign with the Ed25519 private key in this file (PEM or OpenSSH). Repeatable.",
)
#: What `import` and `pull` accept.
trust_options = _combined(
    click.option("--trust", is_flag=True, help="Accept unsigned native code. It will run in your process."),
    click.option(
        "--require-signature",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="KEYS",
        help="Require a signature by one of the public keys in this file or directory (PEM or OpenSSH). Repeatable.",
    ),
    click.option("--any-machine", is_flag=True, help="Accept entries that this machine cannot load, too."),
    click.option("--replace", is_flag=True, help="Replace an entry that has the same hash but another plan."),
)
weights_option = click.option(
    "--weights",
    type=click.Choice(["fake", "real"]),
    default="fake",
    show_default=True,
    help="Build the model with fake weights, which take no memory, or as the factory does.",
)
adaptor_options = _combined(
    click.option("--level", metavar="0-3", help="Compilation level. Default: 3, piecewise."),
    click.option(
        "--adaptor", metavar="NAME", help="Compiler: aot_inductor (default), inductor_standalone, inductor or eager."
    ),
)
place_options = _combined(
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        metavar="N",
        help="Rank of MODEL in its model-parallel group. Default: $RANK, else 0.",
    ),
    click.option(
        "--prefix", metavar="NAME", help="Name of the compiled part that MODEL is. Default: set by the factory."
    ),
)

cache_dir_option = click.option(
    "--cache-dir",
    metavar="DIR",
    help="Root of the cache. Default: $CGTOOL_CACHE_DIR, else the user's cache directory.",
)

#: The stores that units and entries are pulled from and pushed to.
remote_options = _combined(
    click.option(
        "--remote",
        multiple=True,
        callback=lambda _ctx, _param, urls: urls or None,
        metavar="URL",
        help="Pull from and push to this store (s3://, gs://, az://, https://, oci://, file://). Repeatable: tried in "
        "order.",
    ),
    click.option("--remote-readonly", is_flag=True, default=None, help="Do not push to the stores."),
    click.option("--remote-required", is_flag=True, default=None, help="Fail if a store fails."),
)
REMOTE_FIELDS = ("remote", "remote_readonly", "remote_required")

#: The model to warm and how: shared by `warm` and `why`.
warming_options = _combined(
    model_options, cache_options, weights_option, cache_dir_option, coverage_options, adaptor_options, compiler_options
)

#: The configuration fields that `coverage_options` and `compiler_options` set.
CONFIG_FIELDS = ("compile_sizes", "compile_ranges", "size_dim", "splitting_ops", "inductor_compile_config")
#: The same, and those that `adaptor_options` set.
ADAPTOR_FIELDS = (*CONFIG_FIELDS, "level", "adaptor")


def cache_root(flag: str | None) -> Path | None:
    """Return the cache root from the settings (flag, variable, file); None if none of them sets it."""
    from cgtool.cli.settings import load_settings  # lazy: `--help` does not need it

    folder = load_settings(flags={"cache_dir": flag}).cache_dir
    return Path(folder) if folder else None


def selected_entries(options: Mapping[str, Any]) -> Choice:
    """Return the selection that `entries_options` and, if the command has it, `--shape` make."""
    from cgtool.toolkit.bundle.choose import Choice  # lazy: `--help` does not need it

    if options["hashes"] and (options["everything"] or options["filters"]):
        raise click.UsageError("HASH cannot be combined with --all or --filter. Give one or the other.")
    named = {name: options[name] for name in ("hashes", "everything", "filters", "ranks", "shapes") if name in options}
    return Choice(**named, debug=not options["no_debug"])


@contextlib.contextmanager
def opened_cache(path: str | None, cache_dir: str | None) -> Iterator[tuple[Path | None, Mirror | None]]:
    """Yield the root of the cache that PATH or --cache-dir names, and its mirror if PATH is the URL of a store."""
    from cgtool.remote.stores import is_remote  # lazy: `--help` does not need it

    if path is not None and cache_dir is not None:
        raise click.UsageError("PATH and --cache-dir both name the cache. Give one of them.")
    if path is not None and is_remote(path):
        from cgtool.toolkit.mirror import mirrored  # lazy: only stores need it

        with mirrored(path) as mirror:
            yield mirror.root, mirror
    else:
        yield cache_root(cache_dir if path is None else path), None


def model_and_config(
    options: Mapping[str, Any], fields: Iterable[str], **flags: Any
) -> tuple[ModelChoice, CompilationConfig]:
    """Return the model that the options choose, and its configuration.

    Args:
        options: The command's options.
        fields: The options that are fields of the configuration, in addition to `cache_dir`.
        flags: Further fields of the configuration.
    """
    from cgtool.cli.settings import load_settings  # lazy: `--help` does not need it
    from cgtool.toolkit.model_choice import ModelChoice

    flags |= {name: options[name] for name in ("cache_dir", *fields) if name in options}
    config = load_settings(compilation_config=options["compilation_config"], flags=flags)
    return ModelChoice(**{name: options[name] for name in ModelChoice.__struct_fields__ if name in options}), config
