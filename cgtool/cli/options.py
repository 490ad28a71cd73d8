"""Options that many commands share, each spelled once, and how their values are read.

Must not import torch. The values of configuration fields are spelled as `cgtool.config` says. Grammar::

    pair = name "=" (JSON | any other text, taken as a string)

An option that is repeated adds to what came before.
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


def talk_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--json`, `--quiet`, `--verbose` and `--traceback`, and hand the command an `Output` made from them."""

    @click.option("--json", "as_json", is_flag=True, help="Print the report, or the error, as JSON on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="No progress and no advice: only errors on stderr.")
    @click.option("-v", "--verbose", is_flag=True, help="Show what the libraries log, on stderr.")
    @click.option("--traceback", is_flag=True, help="Show where an error came from.")
    @functools.wraps(function)
    def command(*, as_json: bool, quiet: bool, verbose: bool, traceback: bool, **options: Any) -> int | None:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose exclude each other. Give one of them.")
        output = Output(as_json=as_json, quiet=quiet, verbose=verbose, traceback=traceback)
        logs.configure(output)
        return function(output=output, **options)

    return command


def read_shapes(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
    """Return the texts of shapes that were given, once each is known to be one."""
    from cgtool.plan.shapes import parse_shape  # msgspec, which `--help` does without

    for text in (given,) if isinstance(given, str) else given or ():
        try:
            parse_shape(text)
        except ValueError as error:
            message = f"{text[:80]!r} is no shape. Give general, a size (8), a range (2-64) or batch=4:seq=2-64."
            raise click.BadParameter(message, ctx=ctx, param=param) from error
    return given


def read_for_factory(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Read an option that is `--arg` of its name, as `--task` is; `--arg` is read before it."""
    name = str(param.name)
    if value is not None:
        if name in ctx.params["factory_args"]:
            raise click.BadParameter(f"--arg gives a {name.replace('_', ' ')} too. Give it once.", ctx=ctx, param=param)
        ctx.params["factory_args"][name] = value


def read_arguments(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
    """Read `--arg`: keyword arguments, each given once."""
    result: dict[str, Any] = {}
    for text in texts:
        name, value = _pair(text, ctx, param)
        if not name.isidentifier():
            message = f"{name!r} cannot name an argument. Give one such as num_layers=4."
            raise click.BadParameter(message, ctx=ctx, param=param)
        if name in result:
            raise click.BadParameter(f"{name!r} is given twice. Give it once.", ctx=ctx, param=param)
        result[name] = value
    return result


def read_required(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Read `--require`: "num_tokens=1-512" or "num_tokens=7", each dimension once."""
    result: dict[str, tuple[int, int]] = {}
    for text in texts:
        match = _REQUIRED.fullmatch(text)
        if match is None:
            message = f"{text!r} is no range of sizes. Give one such as num_tokens=1-512."
            raise click.BadParameter(message, ctx=ctx, param=param)
        name, low = match["name"], int(match["low"])
        if name in result:
            raise click.BadParameter(f"{name!r} is given twice. Give it once.", ctx=ctx, param=param)
        result[name] = low, int(match["high"] or low)
    return result


def read_settings(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any] | None:
    """Read `--inductor-config`: JSON objects and name=value, what comes later wins; None where it was not given."""
    if not texts:
        return None
    result: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            result.update(_mapping(text, ctx, param))
        else:
            name, value = _pair(text, ctx, param)
            result[name] = value
    return result


def read_listed(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:  # noqa: ARG001 - click's signature
    """Let a bare JSON object stand for a list: {"batch": 4} is [{"batch": 4}]."""
    return f"[{text}]" if text is not None and text.lstrip().startswith("{") else text


def _mapping(text: str, ctx: click.Context, param: click.Parameter) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        hint = "Quote it for the shell: '{\"max_autotune\": true}'."
        raise click.BadParameter(f"{text!r} is no JSON ({error}). {hint}", ctx=ctx, param=param) from error
    return dict(document)


def _pair(text: str, ctx: click.Context, param: click.Parameter) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        message = f"{text!r} is no name=value. Put an equals sign between the name and the value: name=4."
        raise click.BadParameter(message, ctx=ctx, param=param)
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator for all of these, shown by `--help` in the order in which they are given."""

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


#: How MODEL is built.
build_options = _together(
    click.option(
        "--arg",
        "factory_args",
        multiple=True,
        callback=read_arguments,
        is_eager=True,
        metavar="NAME=VALUE",
        help="A keyword argument for MODEL's factory, or a config field of hf:PATH; JSON, else a string. Repeatable.",
    ),
    click.option(
        "--task",
        callback=read_for_factory,
        expose_value=False,
        metavar="TASK",
        help="The head of hf:PATH: causal-lm, sequence-classification, ...; the base model by default.",
    ),
    click.option("--device", metavar="DEVICE", help="Where MODEL is built: cpu, cuda, cuda:1."),
    click.option("--dtype", metavar="DTYPE", help="MODEL's default floating dtype: float32, bfloat16."),
    click.option(
        "--pythonpath",
        multiple=True,
        metavar="DIR",
        help="A folder in which MODEL's modules are looked for first. Repeatable.",
    ),
)
#: What is compiled or measured, and how it is built.
model_options = _together(click.argument("model", metavar="MODEL"), build_options)

#: How hf:PATH decodes: not for commands that call MODEL again and again with the same arguments, which fills a cache.
cache_options = _together(
    click.option(
        "--cache",
        type=click.Choice(["static"]),
        callback=read_for_factory,
        expose_value=False,
        help="Build hf:PATH as generate() calls it: a causal-lm over a key-value cache of one length.",
    ),
    click.option(
        "--cache-length",
        type=click.IntRange(min=1),
        callback=read_for_factory,
        expose_value=False,
        metavar="TOKENS",
        help="How many tokens that cache holds, prompt and answer. Default: what the model takes, 2048 at most.",
    ),
)

#: For which sizes cgtool compiles.
coverage_options = _together(
    click.option(
        "--compile-sizes",
        callback=read_listed,
        metavar="SIZES",
        help="Sizes that cgtool compiles for themselves: 1,8 or cudagraph_capture_sizes or batch=4:seq=128 or JSON.",
    ),
    click.option(
        "--compile-ranges",
        metavar="RANGES",
        help="Inclusive ranges that cgtool compiles for themselves: 1-16,17-64.",
    ),
    click.option(
        "--size-dim", metavar="DIM", help="The dynamic dimension that plain sizes speak of, where several are."
    ),
)

#: How cgtool compiles.
compiler_options = _together(
    click.option(
        "--splitting-ops",
        metavar="OPS",
        help="Ops to split the graph at: ns::op, ns.op, torch.nn.functional.name. Default: known attention ops.",
    ),
    click.option(
        "--inductor-config",
        "inductor_compile_config",
        multiple=True,
        callback=read_settings,
        metavar="JSON|NAME=VALUE",
        help="Options that cgtool gives to Inductor. Repeatable.",
    ),
    click.option(
        "--compilation-config",
        metavar="JSON",
        help="Any fields of CompilationConfig; a single flag wins over it.",
    ),
)

#: Which entries go out, who vouches for them, and what is taken in: `export` and `push`, `import` and `pull`.
entries_options = _together(
    click.argument("hashes", nargs=-1, metavar="[HASH]..."),
    click.option("--all", "everything", is_flag=True, help="Every entry of the cache, whatever the model."),
    click.option(
        "--filter",
        "filters",
        multiple=True,
        metavar="CONDITION",
        help='Only entries such as "model~llama" or "last_used<30d". Repeatable: all must hold.',
    ),
    click.option(
        "--rank", "ranks", type=click.IntRange(min=0), multiple=True, metavar="N", help="Only this rank. Repeatable."
    ),
)
sign_option = click.option(
    "--sign",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="KEY",
    help="Sign with the Ed25519 private key in this file, PEM or OpenSSH. Repeatable.",
)
trust_options = _together(
    click.option("--trust", is_flag=True, help="Take native code that nobody signed: it runs in your process."),
    click.option(
        "--require-signature",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="KEYS",
        help="A file or a folder of public keys, PEM or OpenSSH: one must have signed what is taken. Repeatable.",
    ),
    click.option("--any-machine", is_flag=True, help="Take entries, too, that cannot be loaded on this machine."),
    click.option("--replace", is_flag=True, help="Drop an entry of the cache that has the same hash and another plan."),
)
#: How the model is built to be warmed, and its place in a cache: what `warm` and `why` share beyond the groups above.
weights_option = click.option(
    "--weights",
    type=click.Choice(["fake", "real"]),
    default="fake",
    show_default=True,
    help="Build the model without memory for its weights, or as the factory does.",
)
adaptor_options = _together(
    click.option("--level", metavar="0-3", help="Compilation level. Default: 3, piecewise."),
    click.option(
        "--adaptor", metavar="NAME", help="The compiler: aot_inductor (default), inductor_standalone, inductor, eager."
    ),
)
place_options = _together(
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        metavar="N",
        help="MODEL's place in a model-parallel group. Default: RANK, else 0.",
    ),
    click.option("--prefix", metavar="NAME", help="Which compiled part MODEL is. Default: the factory's word."),
)

cache_dir_option = click.option(
    "--cache-dir",
    metavar="DIR",
    help="The cache's root. Default: CGTOOL_CACHE_DIR, else the user's cache folder.",
)

#: Where units and entries may lie already, and where they go.
remote_options = _together(
    click.option(
        "--remote",
        multiple=True,
        callback=lambda _ctx, _param, urls: urls or None,
        metavar="URL",
        help="A store (s3://, gs://, az://, https://, oci://, file://) to take from and push to. Repeatable: in order.",
    ),
    click.option("--remote-readonly", is_flag=True, default=None, help="Push nothing to the stores."),
    click.option("--remote-required", is_flag=True, default=None, help="Fail where a store does."),
)
REMOTE_FIELDS = ("remote", "remote_readonly", "remote_required")

#: All that says which model is warmed, or would be, and how.
warming_options = _together(
    model_options, cache_options, weights_option, cache_dir_option, coverage_options, adaptor_options, compiler_options
)

#: The parameters of `coverage_options` and `compiler_options` that are fields of the configuration.
CONFIG_FIELDS = ("compile_sizes", "compile_ranges", "size_dim", "splitting_ops", "inductor_compile_config")
#: Those of `adaptor_options` too.
ADAPTOR_FIELDS = (*CONFIG_FIELDS, "level", "adaptor")


def cache_folder(given: str | None) -> Path | None:
    """Return the cache's root as the settings have it (flag, variable, file); None where none of them names one."""
    from cgtool.cli.settings import load_settings  # kept out of `--help`

    folder = load_settings(flags={"cache_dir": given}).cache_dir
    return Path(folder) if folder else None


def entries_chosen(options: Mapping[str, Any]) -> Choice:
    """Return which entries a command was asked for with `entries_options` and, if it has them, with further ones."""
    from cgtool.toolkit.bundle.choose import Choice  # kept out of `--help`

    if options["hashes"] and (options["everything"] or options["filters"]):
        raise click.UsageError("HASH names entries, and --all and --filter choose them. Give one or the other.")
    named = {name: options[name] for name in ("hashes", "everything", "filters", "ranks", "shapes") if name in options}
    return Choice(**named, debug=not options["no_debug"])


@contextlib.contextmanager
def cache_named(path: str | None, cache_dir: str | None) -> Iterator[tuple[Path | None, Mirror | None]]:
    """Yield the cache that PATH or --cache-dir names; where PATH is the URL of a store, its mirror with it."""
    from cgtool.remote.stores import is_remote  # kept out of `--help`

    if path is not None and cache_dir is not None:
        raise click.UsageError("PATH and --cache-dir name the same thing. Give one of them.")
    if path is not None and is_remote(path):
        from cgtool.toolkit.mirror import mirrored  # for stores alone

        with mirrored(path) as mirror:
            yield mirror.root, mirror
    else:
        yield cache_folder(cache_dir if path is None else path), None


def model_asked(
    options: Mapping[str, Any], fields: Iterable[str], **flags: Any
) -> tuple[ModelChoice, CompilationConfig]:
    """Return which model a command was asked for, and its configuration; `fields` names the options that configure."""
    from cgtool.cli.settings import load_settings  # kept out of `--help`
    from cgtool.toolkit.model_choice import ModelChoice

    given = {name: options[name] for name in ("cache_dir", *fields) if name in options}
    config = load_settings(compilation_config=options["compilation_config"], flags={**given, **flags})
    named = (name for name in ModelChoice.__struct_fields__ if name in options)
    return ModelChoice(**{name: options[name] for name in named}), config
