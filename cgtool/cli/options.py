"""Options that many commands share, each spelled once.

Must not import torch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import logs, values
from cgtool.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cgtool.toolkit.warm import ModelOptions

    Command = Callable[..., Any]


def talk_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--json`, `--quiet`, `--verbose` and `--traceback`, and hand the command an `Output` made from them."""

    @click.option("--json", "as_json", is_flag=True, help="Print the report, or the error, as JSON on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="No progress and no advice: only errors on stderr.")
    @click.option("-v", "--verbose", is_flag=True, help="Show what the libraries log, on stderr.")
    @click.option("--traceback", is_flag=True, help="Show where an error came from.")
    @functools.wraps(function)
    def command(*, as_json: bool, quiet: bool, verbose: bool, traceback: bool, **options: Any) -> int | None:
        if quiet and verbose:
            message = "--quiet and --verbose exclude each other. Give one of them."
            raise click.UsageError(message)
        output = Output(as_json=as_json, quiet=quiet, verbose=verbose, traceback=traceback)
        logs.configure(output)
        return function(output=output, **options)

    return command


def read_shapes(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
    """Return the texts of shapes that were given, once each is known to be one.

    Raises:
        click.BadParameter: One is none.
    """
    from cgtool.plan.shapes import parse_shape  # msgspec, which `--help` does without

    for text in (given,) if isinstance(given, str) else given or ():
        try:
            parse_shape(text)
        except ValueError as error:
            message = f"{text[:80]!r} is no shape. Give general, a size (8), a range (2-64) or batch=4:seq=2-64."
            raise click.BadParameter(message, ctx=ctx, param=param) from error
    return given


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator for all of these, shown by `--help` in the order in which they are given."""

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


#: What is compiled or measured: MODEL, and how it is built.
model_options = _together(
    click.argument("model", metavar="MODEL"),
    click.option(
        "--arg",
        "factory_args",
        multiple=True,
        callback=values.arguments,
        metavar="NAME=VALUE",
        help="A keyword argument for the factory; JSON, else a string. Repeatable.",
    ),
    click.option("--device", metavar="DEVICE", help="Where the model is built: cpu, cuda, cuda:1."),
    click.option("--dtype", metavar="DTYPE", help="Its default floating dtype: float32, bfloat16."),
    click.option(
        "--pythonpath",
        multiple=True,
        metavar="DIR",
        help="A folder in which the model's modules are looked for first. Repeatable.",
    ),
)

#: For which sizes cgtool compiles.
coverage_options = _together(
    click.option(
        "--compile-sizes",
        callback=values.listed,
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
        callback=values.settings,
        metavar="JSON|NAME=VALUE",
        help="Options that cgtool gives to Inductor. Repeatable.",
    ),
    click.option(
        "--compilation-config",
        metavar="JSON",
        help="Any fields of CompilationConfig; a single flag wins over it.",
    ),
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
        help="Place in a model-parallel group. Default: RANK, else 0.",
    ),
    click.option(
        "--prefix", metavar="NAME", help="Which compiled part of the model this is. Default: the factory's word."
    ),
)

cache_dir_option = click.option(
    "--cache-dir",
    metavar="DIR",
    help="The cache's root. Default: CGTOOL_CACHE_DIR, else the user's cache folder.",
)

#: All that says which model is warmed, or would be, and how.
warming_options = _together(
    model_options, weights_option, cache_dir_option, coverage_options, adaptor_options, compiler_options
)

#: The parameters of `coverage_options` and `compiler_options` that are fields of the configuration.
CONFIG_FIELDS = ("compile_sizes", "compile_ranges", "size_dim", "splitting_ops", "inductor_compile_config")
#: Those of `adaptor_options` too.
ADAPTOR_FIELDS = (*CONFIG_FIELDS, "level", "adaptor")


def cache_folder(given: str | None) -> Path | None:
    """Return the cache's root as the settings have it (flag, variable, file); None where none of them names one.

    Args:
        given: The value of the flag.

    Raises:
        ConfigError: A configuration file or a variable cannot be read or understood.
    """
    from cgtool.cli.settings import load_settings  # kept out of `--help`

    folder = load_settings(flags={"cache_dir": given}).config.cache_dir
    return Path(folder) if folder else None


def model_asked(options: Mapping[str, Any], fields: Iterable[str], **flags: Any) -> ModelOptions:
    """Return what `warm`, `why` and `check` were asked of a model.

    Args:
        options: The values of their options, by parameter.
        fields: Which of them are fields of the configuration, "cache_dir" aside.
        flags: More fields of the configuration; None is not given.

    Raises:
        ConfigError: A setting cannot be understood.
    """
    from cgtool.cli.settings import load_settings  # kept out of `--help`
    from cgtool.toolkit.warm import ModelOptions

    given = {name: options[name] for name in ("cache_dir", *fields)}
    config = load_settings(compilation_config=options["compilation_config"], flags={**given, **flags}).config
    named = ("model", "factory_args", "weights", "device", "dtype", "pythonpath", "rank", "prefix")
    return ModelOptions(
        **{name: options[name] for name in named},
        config=config,
        cache_dir=Path(config.cache_dir) if config.cache_dir else None,
    )
