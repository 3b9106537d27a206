"""Every command of `geist-pool`. Without a subcommand it is the server.

The exit code says what happened (docs/operations.md lists them); an error is one sentence on stderr.

What a command shows a person, and the client, are imported by the commands that need them: a server starts sooner without.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from geist_pool import config as settings
from geist_pool import models, observe, terminal
from geist_pool.config import PoolConfig
from geist_pool.errors import BadRequest, ConfigError, GeistPoolError, Internal, NameTaken, NoAnswer, PoolLost, Unsupported
from geist_pool.protocol import Message, Sampling

if TYPE_CHECKING:
    from geist_pool.client import Client

EPILOG: Final = """\b
First steps:
  geist-pool demo                                   see it work, in a pool of its own
  geist-pool                                        serve the demo's model; Ctrl-C stops it
  geist-pool contexts create tavern story.txt       in another terminal: keep a context
  geist-pool ask --context tavern "The host says:"  continue it
"""


class ExitCode(IntEnum):
    """Beside these: 128 + the signal's number for a command, or a server's start, that a signal ended."""

    DONE = 0  # also a server that a signal stopped in order
    FAILED = 1  # the pool, the model or a request
    USAGE = 2  # a wrong call or setting
    NAME_TAKEN = 3  # a pool of this name runs already
    GAVE_UP = 4  # the server's processes died again and again
    NO_POOL = 5  # nobody answers at the address


def _choices(name: str) -> click.Choice[str]:
    """The values of a setting that is one of several words."""
    hint = PoolConfig.__annotations__[name]
    return click.Choice(list(getattr(settings, hint).__args__))


SERVER_OPTIONS: Final = ("config", "name", "address", "cache_dir")  # those that the other commands understand as well


@click.group(invoke_without_command=True, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", metavar="PATH|NAME", help="A GGUF file, or what `geist-pool pull` fetches.  [smollm2]")
@click.option("--workers", type=int, metavar="N", help="Worker processes.  [one per core]")
@click.option("--threads", type=int, metavar="N", help="Threads of each worker.  [1]")
@click.option("--slots", type=int, metavar="N", help="Requests that a worker holds at a time.  [1]")
@click.option("--name", metavar="NAME", help="The pool's name; pools of different names run side by side.  [default]")
@click.option("--address", metavar="ADDRESS", help="ipc:///path or tcp://127.0.0.1:PORT.  [an ipc socket of the pool's name]")
@click.option("--memory", metavar="SIZE", help="Shared memory for contexts, e.g. 8GiB.  [half of what is free]")
@click.option("--n-ctx", type=int, metavar="N", help="Most tokens of a session.  [the model's]")
@click.option("--kv-type", type=_choices("kv_type"), help="Type of the KV cache.  [f16]")
@click.option("--tier", type=_choices("tier"), help="Instruction set; all give the same numbers.  [auto]")
@click.option("--queue", type=int, metavar="N", help="Requests that may wait; one more is answered `busy`.  [1024]")
@click.option("--prefill-chunk", type=int, metavar="N", help="Tokens that are taken in between two looks at the mailbox.  [128]")
@click.option("--keep-contexts", is_flag=True, default=None, help="Leave contexts in shared memory at a stop.")
@click.option("--ready-file", metavar="PATH", help="Written when the pool is ready, removed when it stops.")
@click.option("--metrics", metavar="ADDRESS", help="Serve Prometheus text, e.g. at 127.0.0.1:9464.  [nowhere]")
@click.option("--saved-dir", metavar="DIR", help="Contexts saved to files.  [~/.local/share/geist-pool/saved]")
@click.option("--verify", is_flag=True, default=None, help="Hash the whole model file again.")
@click.option("--cache-dir", metavar="DIR", help="Models and packed weights.  [~/.cache/geist-pool]")
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of settings, named as the options here."
)
@click.option("--log-level", type=_choices("log_level"), help="[info]")
@click.option("--log-format", type=_choices("log_format"), help="[console]")
@click.version_option(package_name="geist-pool")
@click.pass_context
def main(ctx: click.Context, /, config: Path | None, **flags: Any) -> None:
    """A pool of worker processes that answer from language-model contexts kept in shared memory.

    Without a command this is the server. Settings may also stand in a TOML file or in variables GEIST_POOL_<SETTING>.
    """
    if ctx.invoked_subcommand is not None and ctx.invoked_subcommand != "demo":
        alien = [f for f, v in flags.items() if v is not None and f not in SERVER_OPTIONS]
        if alien:
            raise click.UsageError(f"--{alien[0].replace('_', '-')} is an option of the server, not of {ctx.invoked_subcommand}")
    ctx.obj = settings.load(flags, config_file=config)
    if ctx.invoked_subcommand is None:
        serve(ctx.obj)


def serve(config: PoolConfig) -> None:
    """Runs the server until a signal ends it; one that comes before it was ready leaves as KeyboardInterrupt."""
    from geist_pool.signals import signals_interrupt
    from geist_pool.supervisor import Supervisor

    observe.set_up("pool", log_format=config.log_format, log_level=config.log_level)
    ready = False
    try:
        with signals_interrupt():
            if models.is_fetched(config.model):
                terminal.pull(config.model, Path(config.cache_dir))
            with Supervisor(config) as pool:
                ready = True
                c = pool.config
                words = f"pool {c.name} serves {c.model} at {c.address} with {c.workers} workers; Ctrl-C stops it"
                terminal.say(words, style="bold")
                pool.wait()
    except KeyboardInterrupt:
        if not ready:
            raise


@main.command()
@click.option("--workers", type=int, metavar="N", help="Worker processes.  [one per core, at most 4]")
@click.option("--model", metavar="PATH|NAME", help="Another model than SmolLM2-135M-Instruct.")
@click.pass_obj
def demo(config: PoolConfig, workers: int | None, model: str | None) -> None:
    """Show what a snapshot saves, with an inn and its people.

    Asks ten questions with and without one, generated and chosen, and compares the answers.

    Fetches a small model once (98 MB), starts a pool of its own, and leaves nothing behind.
    """
    from geist_pool.demo.run import run_demo

    changes = {k: v for k, v in (("workers", workers), ("model", model)) if v is not None}
    if not run_demo(msgspec.structs.replace(config, **changes), terminal.console()):
        raise Internal("the demo found answers that differ, or something that was left behind; see above")


@main.command()
@click.argument("name")
@click.pass_obj
def pull(config: PoolConfig, name: str) -> None:
    """Fetch a model into the cache and print its path.

    NAME is smollm2, gemma3-270m (under the Gemma Terms of Use), or hf:OWNER/REPO/FILE.gguf for a file of the Hugging Face hub
    (hf:OWNER/REPO@REVISION/FILE.gguf for one commit, branch or tag). A fetch from the hub that was cut off goes on where it
    stopped.
    """
    click.echo(str(terminal.pull(name, Path(config.cache_dir))))


@main.command("models")
@click.pass_obj
def list_models(config: PoolConfig) -> None:
    """List the models that can be named, and the weights packed so far."""
    from geist_pool import cached, show

    cache = Path(config.cache_dir)
    terminal.console().print(show.models(cached.list_models(cache), cached.list_packed(cache)))


@main.command()
@click.argument("path")
@click.pass_obj
def info(config: PoolConfig, path: str) -> None:
    """Tell what the model file at PATH is.

    Architecture, sizes, bytes of state (fixed and per token), and what of it is unsupported.
    """
    from geist_pool import show
    from geist_pool.describe import describe

    facts, reasons = describe(models.resolve(path, Path(config.cache_dir)))
    terminal.console().print(show.facts(facts))
    if reasons:
        raise Unsupported("this model cannot be served: " + "; ".join(reasons))


# ---- commands that talk to a running pool

_space = click.option("--space", default="default", show_default=True, help="The space that contexts are looked up in.")


def _client(config: PoolConfig, space: str) -> Client:
    from geist_pool.client import Client

    return Client(config.address, space=space)


@main.command()
@click.argument("prompt")
@click.option("--context", metavar="NAME", help="The context to continue, by name or id; without one PROMPT is the whole prompt.")
@click.option("--label", "labels", multiple=True, help="Score this continuation instead of generating; give several.")
@click.option("--chat", is_flag=True, help="Send PROMPT as a user's message through the model's chat template.")
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token.")
@click.option("--seed", type=int, help="Repeats an answer.")
@_space
@click.pass_obj
def ask(
    config: PoolConfig,
    prompt: str,
    context: str | None,
    labels: tuple[str, ...],
    chat: bool,
    max_tokens: int,
    stop: tuple[str, ...],
    temperature: float,
    seed: int | None,
    space: str,
) -> None:
    """Continue a context by PROMPT, or rank labels.

    The answer is printed as it comes. With --label nothing is generated: the labels are ranked by their log-probability.
    """
    what: Any = [Message("user", prompt)] if chat else prompt
    with _client(config, space) as client:
        if labels:
            scored = client.score(what, labels, context=context)
            order = sorted(range(len(labels)), key=lambda i: -scored.labels[i].sum)
            for i in order:
                found = scored.labels[i]
                click.echo(f"{found.sum:10.4f}  {found.mean:9.4f} per token  {labels[i]!r}")
            _print_usage(scored)
            return
        sampling = Sampling(temperature=temperature, seed=seed)
        with client.stream(what, context=context, max_tokens=max_tokens, stop=stop, sampling=sampling) as stream:
            try:
                for chunk in stream:
                    click.echo(chunk.text, nl=False)
            finally:
                click.echo()  # an error's sentence starts on a line of its own
            _print_usage(stream.result())


def _print_usage(result: Any) -> None:
    usage, ms = result.usage, result.timings.total / 1000
    text = f"reused {usage.reused}, prefilled {usage.prefilled}, generated {usage.generated} tokens in {ms:.1f} ms"
    terminal.console(stderr=True).print(text, style="dim")


@main.group(invoke_without_command=True)
@_space
@click.pass_context
def contexts(ctx: click.Context, space: str) -> None:
    """List, create, drop, save and load contexts."""
    ctx.obj = (ctx.obj, space)
    if ctx.invoked_subcommand is None:
        _list_contexts(*ctx.obj)


@contexts.command("ls")
@click.pass_obj
def contexts_ls(obj: tuple[PoolConfig, str]) -> None:
    """List all contexts of the space."""
    _list_contexts(*obj)


def _list_contexts(config: PoolConfig, space: str) -> None:
    from geist_pool import show

    with _client(config, space) as client:
        terminal.console().print(show.contexts(client.contexts()))


@contexts.command("create")
@click.argument("name")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option("--on", metavar="NAME", help="The context that this one continues, by name or id.")
@click.option("--pin", is_flag=True, help="Never evict it.")
@click.pass_obj
def contexts_create(obj: tuple[PoolConfig, str], name: str, file: Any, on: str | None, pin: bool) -> None:
    """Keep the text of FILE (- for standard input) as a context called NAME."""
    config, space = obj
    try:
        text = file.read()
    except UnicodeDecodeError as e:
        raise BadRequest(f"{file.name} is no UTF-8 at byte {e.start}") from None
    with _client(config, space) as client:
        made = client.create_context(text, name=name, on=on, pin=pin)
    click.echo(f"{made.context.id}  {made.context.n_tokens} tokens  {'created' if made.created else 'existed'}")


@contexts.command("drop")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def contexts_drop(obj: tuple[PoolConfig, str], names: tuple[str, ...]) -> None:
    """Forget contexts by name or id."""
    config, space = obj
    with _client(config, space) as client:
        for name in names:
            click.echo(client.drop_context(name))


@contexts.command("save")
@click.argument("name")
@click.argument("saved", required=False, metavar="[AS]")
@click.pass_obj
def contexts_save(obj: tuple[PoolConfig, str], name: str, saved: str | None) -> None:
    """Write the context NAME (or id) to a file in the pool's directory, under AS or its own name."""
    from geist_pool import show

    config, space = obj
    with _client(config, space) as client:
        info = client.save_context(name, saved=saved)
    click.echo(f"{show.plain(info.saved)}  {info.n_tokens} tokens  {info.bytes} bytes")


@contexts.command("load")
@click.argument("saved")
@click.option("--name", metavar="NAME", help="Call it so, instead of as it was called.")
@click.option("--ttl", "ttl_s", type=int, metavar="SECONDS", help="Drop it after so long.")
@click.option("--pin", is_flag=True, help="Never evict it.")
@click.pass_obj
def contexts_load(obj: tuple[PoolConfig, str], saved: str, name: str | None, ttl_s: int | None, pin: bool) -> None:
    """Bring the saved context SAVED back into shared memory."""
    config, space = obj
    with _client(config, space) as client:
        made = client.load_context(saved, name=name, ttl_s=ttl_s, pin=pin)
    click.echo(f"{made.context.id}  {made.context.n_tokens} tokens  {'loaded' if made.created else 'existed'}")


@contexts.command("saved")
@click.pass_obj
def contexts_saved(obj: tuple[PoolConfig, str]) -> None:
    """List what the space has saved."""
    config, space = obj
    from geist_pool import show

    with _client(config, space) as client:
        terminal.console().print(show.saved(client.saved_contexts()))


@main.command()
@click.argument("id")
@_space
@click.pass_obj
def story(config: PoolConfig, id: str, space: str) -> None:
    """Tell what happened to a request, job, context or worker ID.

    Only as far as the broker remembers it; counts and ids, never text.
    """
    from geist_pool import show

    with _client(config, space) as client:
        events = client.story(id)
    terminal.console().print(show.story(events))


@main.command("top")
@click.option("--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="Print one frame and end; also where the output is no terminal.")
@_space
@click.pass_obj
def show_top(config: PoolConfig, interval: float, once: bool, space: str) -> None:
    """Watch a running pool: workers, memory, contexts, rates. Ctrl-C ends it."""
    from geist_pool import top

    console = terminal.console()
    with _client(config, space) as client:
        try:
            top.run(client, console, interval=interval, once=once)
        except KeyboardInterrupt:
            if once or not console.is_terminal:
                raise


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def stats(config: PoolConfig, as_json: bool) -> None:
    """Print the counters and gauges of a running pool."""
    from geist_pool import show

    with _client(config, "default") as client:
        found = client.stats()
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    terminal.console().print(show.stats(found))


def run(arguments: Sequence[str]) -> int:
    """Runs one command; every error is one sentence on stderr."""
    try:
        main.main(args=list(arguments), prog_name="geist-pool", standalone_mode=False)
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt) as e:
        terminal.say("interrupted")
        return 128 + int(getattr(e.__cause__ or e, "number", signal.SIGINT))  # click raises Abort from what came
    except BrokenPipeError:  # the reader of our output has gone
        return ExitCode.FAILED
    except GeistPoolError as e:
        terminal.say_error(str(e))
        return exit_code(e)
    except OSError as e:  # a full disk behind standard output, no process or descriptor to be had
        where = f": {e.filename}" if e.filename else ""
        terminal.say_error(f"{e.strerror or e}{where}")
        return ExitCode.FAILED
    return ExitCode.DONE


def exit_code(error: GeistPoolError) -> ExitCode:
    """Of a command that ended with this error."""
    for kind, code in (
        (NameTaken, ExitCode.NAME_TAKEN),
        (ConfigError, ExitCode.USAGE),
        (PoolLost, ExitCode.GAVE_UP),
        (NoAnswer, ExitCode.NO_POOL),
    ):
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED
