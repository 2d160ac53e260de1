"""The command line: a command parses, calls one function and prints its answer; it imports what it needs.

Exit codes: 0 clean, 1 findings (a wrong spec, a stale file), 2 wrong usage (a missing file too), 3 a compiler
or GPU is missing, 70 an internal error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from gradgen import __version__
from gradgen import cli_console as console

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
OPTION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(true|false|-?[0-9]{1,19})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Never raises."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    console.prepare()
    try:
        code = _run(given)
    except KeyboardInterrupt:
        console.error("interrupted")
        code = console.INTERRUPTED
    except console.AnswerError as error:
        console.error(f"error: {error}")
        code = console.USAGE
    except Exception:
        code = console.internal_error(given)
    return console.finish(code)


def _run(arguments: list[str]) -> int:
    """The exit code of a command, with every error that is not a bug said in a line."""
    from gradgen.diagnostics import BuildError, ConfigError, SpecError, UsageError
    from gradgen.infer_facts import InferError

    try:
        if "_GRADGEN_COMPLETE" in os.environ:
            cli.main(arguments, prog_name="gradgen")
        with cli.make_context("gradgen", arguments) as context:
            return cli.invoke(context) or console.OK
    except click.exceptions.Exit as end:
        return end.exit_code
    except BrokenPipeError:  # a reader left while click printed help
        return console.OK
    except click.exceptions.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except (ConfigError, UsageError) as error:
        console.error(f"error: {error}")
        return console.USAGE
    except SpecError as error:
        from gradgen.cli_reports import findings_text

        console.error(findings_text(error.diagnostics, sys.stderr))
        return console.FINDINGS
    except InferError as error:
        console.error(f"error: {error}")
        return console.FINDINGS
    except BuildError as error:
        console.error(f"error: {error}")
        from gradgen.toolchain import ToolchainMissing

        return console.MISSING if isinstance(error, ToolchainMissing) else console.FINDINGS


def _spec(_: click.Context, __: click.Parameter, value: Any) -> Any:
    """Paths as they are; a bare name is a shipped spec."""
    if not isinstance(value, str):
        return tuple(_spec(_, __, item) for item in value)
    if value == "-":
        raise click.BadParameter(
            "a spec is read from a file, not from standard input: findings name its lines"
        )
    if re.fullmatch(r"[A-Za-z0-9_]{1,100}", value) and not os.path.lexists(value):
        from gradgen.load import find_spec

        return find_spec(value)
    return value


def _assignments(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> dict[str, int | bool]:
    """`--set hidden=512 --set tied=true` as a mapping."""
    result: dict[str, int | bool] = {}
    for text in value:
        match = OPTION.fullmatch(text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not dim=integer or flag=true|false")
        name, wanted = match.groups()
        if name in result:
            raise click.BadParameter(f"{name} is set twice")
        result[name] = wanted == "true" if wanted in ("true", "false") else int(wanted)
    return result


def _arch(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Checked here, so that the message names the option."""
    from gradgen.cuda_toolchain import parse_arch
    from gradgen.diagnostics import UsageError

    try:
        return value if value is None else ",".join(parse_arch(value))
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


COUNT = click.IntRange(min=1, max=2**31 - 1)
one_spec = click.argument("spec", callback=_spec)
many_specs = click.argument("specs", metavar="SPEC...", nargs=-1, required=True, callback=_spec)
any_specs = click.argument("specs", metavar="[SPEC]...", nargs=-1, callback=_spec)
as_json = click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
output = click.option(
    "-o", "--output", default="generated", show_default=True, metavar="DIR", help="Folder of the packages."
)
force = click.option("--force", is_flag=True, help="Write beside files that gradgen did not write.")


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="gradgen", message="%(prog)s %(version)s")
def cli() -> None:
    """Compile YAML model specs into gradient managers."""


@cli.command()
@many_specs
@as_json
def check(specs: tuple[str, ...], as_json: bool) -> int:
    """Check specs; show all findings."""
    from gradgen import cli_reports

    report = cli_reports.check(specs)
    if as_json:
        console.answer_json(report.to_json())
    else:
        for result in report.results:
            if result.unreadable:
                console.error(f"error: {result.unreadable}")
            else:
                console.answer(cli_reports.result_text(result, sys.stdout))
    return report.code


@cli.command()
@any_specs
@output
@click.option("--check", "only_check", is_flag=True, help="Write nothing; show what is stale.")
@force
def generate(specs: tuple[str, ...], output: str, only_check: bool, force: bool) -> int:
    """Render specs (without SPEC: all of specs/) into packages of C++ and Python text."""
    from gradgen import cli_reports
    from gradgen.generate import generate as run

    result = run(specs or cli_reports.shipped_specs(), output, check=only_check, force=force)
    again = " ".join(["gradgen generate", *specs, *([] if output == "generated" else ["-o", output])])
    console.answer(cli_reports.generated_text(result, again, sys.stdout))
    return console.FINDINGS if only_check and result.stale else console.OK


@cli.command()
@many_specs
@output
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "auto"]),
    default="auto",
    show_default=True,
    help="What it runs on. auto: cuda if nvcc and a GPU are here, or --arch is given.",
)
@click.option(
    "--arch",
    metavar="SM",
    callback=_arch,
    help="GPUs to compile for, as in sm_80,sm_90; they need not be here (default: those that are).",
)
@click.option("-j", "--jobs", type=COUNT, metavar="N", help="Compilers at a time (default: one a core).")
@force
def build(
    specs: tuple[str, ...], output: str, device: str, arch: str | None, jobs: int | None, force: bool
) -> int:
    """Generate packages and compile them."""
    from gradgen.cli_reports import counted
    from gradgen.generate import check_specs
    from gradgen.package import build as run

    check_specs(specs)
    for spec in specs:
        with console.Progress(f"compiling {spec}") as log:
            package = run(spec, output, device=device, arch=arch, jobs=jobs, force=force, log=log)
        console.answer(f"{package.dir}: {counted(len(package.written), 'file')} written")
    return console.OK


@cli.command()
@one_spec
@click.option("--preset", metavar="NAME", help="A preset of the spec.")
@click.option(
    "--set", "values", multiple=True, metavar="DIM=VALUE", callback=_assignments, help="A dim or flag."
)
@click.option("--dp", type=COUNT, default=1, show_default=True, metavar="N", help="Data-parallel ranks.")
@click.option("--ga", type=COUNT, default=1, show_default=True, metavar="N", help="Micro-steps a step.")
@click.option("--strategy", metavar="S", help="One strategy (default: all of the spec).")
@click.option(
    "--dtype", default="float32", show_default=True, metavar="D", help="Dtype of produced gradients."
)
@click.option("--accumulator", metavar="D", help="Dtype of sums (default: as produced).")
@click.option("--wire", metavar="D", help="Dtype of what is sent.")
@click.option("--rounding", default="nearest", show_default=True, metavar="R", help="nearest or stochastic.")
@click.option(
    "--transport",
    default="group",
    show_default=True,
    metavar="T",
    help="single, threads, shared (ranks of one host), group (any hosts: needs memory to receive), or nccl (GPUs).",
)
@click.option("--offload", is_flag=True, help="GPUs: block shards lie in pinned host memory.")
@click.option("--block", metavar="NAME", help="Show the layout of one block or weight.")
@as_json
def plan(spec: str, block: str | None, as_json: bool, values: dict[str, int | bool], **settings: Any) -> int:
    """Show where gradients lie, what they cost, and what is sent."""
    from gradgen import plan_table
    from gradgen.plan import plan as run

    result = run(spec, values=values, **settings)
    chosen_by = click.get_current_context().get_parameter_source("transport")
    if settings["dp"] > 1 and not as_json and chosen_by is click.core.ParameterSource.DEFAULT:
        console.note("planned for ranks on any hosts; ranks of one host receive nothing: --transport shared")
    if as_json:
        data = result.to_json()
        chosen = result.arena(block).id if block else None
        console.answer_json(next(a for a in data["arenas"] if a["id"] == chosen) if chosen else data)
    else:
        console.answer(plan_table.block_table(result, block) if block else plan_table.table(result))
    return console.OK


@cli.command()
@click.argument("model")
@click.option("-o", "--output", metavar="FILE", help="Write the spec there (default: standard output).")
@click.option("--name", metavar="ID", help="The model's id (default: its model type, class or file).")
def infer(model: str, output: str | None, name: str | None) -> int:
    """Write the spec of a model.

    MODEL is a transformers config.json or a folder with one, package.module:factory (a function that returns a
    torch.nn.Module), or a safetensors file or index. Nothing is downloaded, no remote code runs, no weight is loaded.
    The spec is read back and compared with the model: every parameter is in it, or the command fails and says which
    are not.
    """
    from gradgen.infer import infer_file

    result = infer_file(model, name=name)
    if output is None:
        console.answer(result.text)
    else:
        result.write(output)
    console.note(result.summary())
    return console.OK


@cli.command()
def schema() -> int:
    """Print the JSON Schema of specs, for editors."""
    from gradgen import cli_reports

    console.answer(cli_reports.schema_text())
    return console.OK


@cli.command()
@click.argument("code", required=False)
@as_json
def explain(code: str | None, as_json: bool) -> int:
    """Explain a kind of finding with an example (without CODE: list the kinds)."""
    from gradgen import cli_reports
    from gradgen.explain import explanations, find

    if code is None:
        every = explanations()
        if as_json:
            console.answer_json([one.to_json() for one in every])
        else:
            console.answer(cli_reports.codes_table(every))
        return console.OK
    found = find(code)
    if as_json:
        console.answer_json(found.to_json())
    else:
        console.answer(found.text)
    return console.OK


@cli.group("cache")
def cache_group() -> None:
    """The cache of compiled modules."""


@cache_group.command("dir")
def cache_dir() -> int:
    """Print the cache's folder."""
    from gradgen import paths

    console.answer(str(paths.cache_dir()))
    return console.OK


@cache_group.command("list")
@as_json
def cache_list(as_json: bool) -> int:
    """List what is in the cache."""
    from gradgen import cache, cli_reports

    entries = cache.cache_entries()
    if as_json:
        console.answer_json([entry.to_json() for entry in entries])
    else:
        console.answer(cli_reports.cache_table(entries))
    return console.OK


@cache_group.command("clean")
def cache_clean() -> int:
    """Remove what no running process uses."""
    from gradgen import cache, cli_reports

    console.answer(cli_reports.cleaned_text(cache.clean()))
    return console.OK
