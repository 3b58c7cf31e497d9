"""The command `scratchformer`: train, score and use models, check gradients, and learn to write them."""

from __future__ import annotations

import argparse
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ..course.command import add_command as add_learn
from ..export.command import add_command as add_export
from ..museum.command import add_command as add_museum
from ..pages.command import add_command as add_page
from ..parallel.replicas import MAX_REPLICAS
from ..shell.options import SEED, CommandLine
from ..shell.process import run_program, signals_caught, stop
from ..shell.reading import read_text
from ..shell.text import one_line
from ..version import __version__

INTEGERS = {"int8": 8, "int4": 4}  # bits of the weights, by the name of a precision
TOGETHER, SEPARATOR = 32, "---\n"  # texts that `generate` writes at once, and what it prints between them


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run one command; an error gives one line and exit status 1."""
    run_program(lambda: run_command(sys.argv[1:] if argv is None else argv))


def run_command(argv: list[str]) -> None:
    """Parse this command line and run its command; errors are raised."""
    end = arguments_of_command(argv)
    args = make_parser().parse_args(argv[:end])
    args.others = argv[end:]
    from ..training.snapshot import NotImported
    from ..training.start import file_of

    try:
        args.run(args)
    except NotImported as error:
        command = shlex.join(["scratchformer", *argv, "--program", file_of(Path(args.run_folder))])
        raise ValueError(f"{error}; if you trust it: {command}") from error


def arguments_of_command(argv: list[str]) -> int:
    """How many arguments belong to the command itself; the rest are passed on to pytest or to a program."""
    if argv[:1] == ["train"]:
        return 2
    return argv.index("--") if argv[:1] == ["mutate"] and "--" in argv else len(argv)


def make_parser() -> CommandLine:
    parser = CommandLine(prog="scratchformer", description=__doc__)
    parser.add_argument("--version", action="version", version=f"scratchformer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable, help: str, **options: Any) -> Any:
        """A command with the name of the function that runs it."""
        command = commands.add_parser(run.__name__, help=help, **options)
        command.set_defaults(run=run)
        return command

    usage = "scratchformer train [NAME [OPTIONS OF THE PROGRAM]]"
    command = add(train, "run one of the programs that train a model, or list them", usage=usage)
    command.add_argument("name", nargs="?", metavar="NAME", help="for example enwik8; without it, all are listed")

    add(doctor, "print what a bug report needs")

    command = add(check, "check the gradients of all operations and layers, or of those named")
    command.add_argument("names", nargs="*", metavar="NAME", help="for example attention, SelfAttention, LanguageModel")
    command.add_argument("--only", choices=("reference", "twin"), help="references or fast twins (default: both)")
    command.add_argument("--device", default="cpu", help="auto, cpu, gpu or gpu:1 (default: cpu)")
    command.add_argument("--seed", default=0, **SEED, help="random seed of the arrays (default: 0)")
    command.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="check the precision in this type instead"
    )
    command.add_argument(
        "--derivations", action="store_true", help="evaluate every equation of the derivations instead"
    )
    command.add_argument("--mistakes", action="store_true", help="with --derivations: also plant mistakes in them")

    usage = "scratchformer mutate [OPTIONS] MODULE[::FUNCTION] ... [-- PYTEST ARGUMENTS]"
    command = add(mutate, "plant mistakes in a backward and report those that your tests miss", usage=usage)
    command.add_argument(
        "names", nargs="+", metavar="MODULE[::FUNCTION]", help="for example my_ops.py::cube_backward, my_ops"
    )
    command.add_argument("--helpers", action="store_true", help="also in functions that the backward calls")
    number: dict[str, Any] = {"type": int, "metavar": "N", "min": 1}
    command.add_argument("-j", "--jobs", **number, max=MAX_REPLICAS, help="processes (default: one for each core)")
    command.add_argument("--limit", **number, help="plant N mistakes, drawn at random")
    command.add_argument("--seed", default=0, **SEED, help="random seed of --limit (default: 0)")
    command.add_argument("--list", action="store_true", help="list the mistakes and run nothing")
    command.add_argument("--json", metavar="FILE", help="write every outcome to this file")

    command = add(show, "print the loops that are made from the derivation of an operation")
    command.add_argument(
        "name", metavar="NAME", help="an operation of the package, or FILE.py::FUNCTION, whose file is executed"
    )
    target = command.add_mutually_exclusive_group(required=True)
    for option, what in (("numba", "Numba"), ("cuda", "CUDA"), ("js", "JavaScript")):
        target.add_argument(
            f"--{option}", dest="target", action="store_const", const=option, help=f"the loops in {what}"
        )

    add_page(commands)

    command = add(site, "open the site of this package, which needs no network")
    command.add_argument("--to", metavar="FOLDER", help="the folder to unpack it into (default: in the cache folder)")
    command.add_argument("--no-open", action="store_true", help="only print the path of its first page")

    command = add(generate, "generate text with a trained language model")
    add_run(command, "folder of a run, a snapshot, or a published decoder, such as GPT-2 or Llama")
    command.add_argument(
        "--prompt", action="append", help="what to continue (default: a new line); may be given several times"
    )
    command.add_argument(
        "--prompts", metavar="FILE", help="also continue each line of this file, or of standard input (-)"
    )
    tokens = "how many tokens (bytes or sub-words) to write (default: 500)"
    command.add_argument("--tokens", type=int, default=500, metavar="N", min=0, help=tokens)
    add_sampling(command)
    penalty = "above 1: tokens that have occurred in the text become less likely (default: 1)"
    command.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", min=0, help=penalty)
    ends = "end a text before it contains this; may be given several times"
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help=ends)

    command = add(chat, "talk to a published instruct model")
    command.add_argument(
        "run_folder", metavar="FOLDER", help="a published decoder with a chat template, or a run of one"
    )
    command.add_argument(
        "--system", metavar="TEXT", help="the system message (default: that of the template, if it has one)"
    )
    command.add_argument("--tokens", default=1000, **number, help="how many tokens an answer may have (default: 1000)")
    context = "how many tokens of the conversation the model sees at most (default: 4096)"
    command.add_argument("--context", default=4096, **number, help=context)
    add_sampling(command)

    command = add(translate, "translate with a trained encoder-decoder")
    add_run(command, "folder of a run of an encoder-decoder")
    command.add_argument("sentences", nargs="*", metavar="SENTENCE", help="(default: the lines of standard input)")
    add_use(command)

    command = add(evaluate, "score a trained model on held-out data")
    add_run(command, "folder of a run")
    command.add_argument("--data", metavar="PATH", help="the data, if it has moved since the run")
    parts = "the part of the data to score (default: test)"
    command.add_argument("--part", choices=("validation", "test"), default="test", help=parts)
    add_use(command)

    add_export(commands)

    command = add(plot, "plot a run: curves, attention maps, position encodings")
    add_run(command, "folder of a run")
    command.add_argument(
        "beside", nargs="*", metavar="OTHER", help="runs to compare it with: plot only curves, together"
    )

    add_learn(commands)
    add_museum(commands)
    return parser


def add_run(command: CommandLine, what: str) -> None:
    command.add_argument("run_folder", metavar="RUN", help=what)
    command.add_argument(
        "--program", metavar="FILE", help="execute this file: the program of the run, unless it is one of examples/"
    )


def add_sampling(command: Any) -> None:
    number: dict[str, Any] = {"type": float, "metavar": "X", "min": 0}
    command.add_argument("--temperature", default=0.8, **number, help="0 is greedy (default: 0.8)")
    likely = "draw only from the K most likely tokens (default: from all)"
    command.add_argument("--top-k", type=int, metavar="K", min=1, help=likely)
    likely = "draw only from the smallest set of tokens whose probabilities sum to at least P (default: from all)"
    command.add_argument("--top-p", type=float, metavar="P", min=0, max=1, help=likely)
    command.add_argument("--seed", default=0, **SEED, help="random seed of the text (default: 0)")
    add_use(command)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `generation.generate` that a command has."""
    names = [name for name in ("temperature", "top_k", "top_p", "repetition_penalty") if hasattr(args, name)]
    for name in names[2:]:
        if getattr(args, name) == 0:
            raise ValueError(f"--{name.replace('_', '-')}: expected more than 0, got 0.0")
    return {name: getattr(args, name) for name in names}


def add_use(command: CommandLine) -> None:
    """The options of commands that only read a model's weights."""
    command.add_argument("--device", default="auto", help="auto, cpu, gpu or gpu:1 (default: a GPU if there is one)")
    precision = (
        "the type of weights, keys and values: bfloat16 takes half the memory, and on a CPU less time; int8 and int4 "
        "are for weights alone, on a CPU, with a scale for every 32 of them (default: float32)"
    )
    command.add_argument("--precision", choices=("float32", "bfloat16", *INTEGERS), default="float32", help=precision)


def type_of(args: argparse.Namespace) -> Any:
    """The type of the weights with --precision; None for that in which they are saved."""
    from ..backend import get_device
    from ..parallel.precision import half_type

    return None if args.precision in INTEGERS else half_type(args.precision, get_device(args.device))


def placed(model: Any, args: argparse.Namespace) -> Any:
    """The model on the device of --device, in the type of --precision."""
    from ..backend import get_device
    from ..generation import quantize

    model.to(get_device(args.device), type_of(args))
    return quantize(model, INTEGERS[args.precision]) if args.precision in INTEGERS else model


def train(args: argparse.Namespace) -> None:
    """Run a program as `python FILE` would, or list all. A file in the current folder is never taken for one."""
    from ..training.examples import examples, first_line

    programs = examples()
    if args.name is None:
        for name, file in programs.items():
            print(f"{name:<22} {first_line(file)}")
        return
    if args.name not in programs:
        known = ", ".join(programs) or "none, since this package was installed without its programs"
        raise ValueError(f"train: expected the name of a program ({known}), got {args.name!r}")
    sys.argv = [str(programs[args.name]), *args.others]
    sys.path.insert(0, str(programs[args.name].parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def doctor(args: argparse.Namespace) -> None:
    from .doctor import report

    for subject, finding in report():
        print(f"{subject:<14} {finding}")


def check(args: argparse.Namespace) -> None:
    from ..backend import get_device
    from ..catalogue.check import check_cases, select_cases

    expect_one_check(args)
    started = time.perf_counter()
    if args.derivations:
        from ..catalogue.derivations import check_all, select_derivations

        wrong, count = check_all(args.names, args.seed, args.mistakes), len(select_derivations(args.names))
    else:
        wrong = check_cases(args.names, get_device(args.device), args.seed, args.only, args.dtype)
        count = len(select_cases(args.names, args.dtype))
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")
    print(f"\nall {count} right in {time.perf_counter() - started:.0f} s")


def expect_one_check(args: argparse.Namespace) -> None:
    """Raise ValueError for options of `check` that would have no effect."""
    if args.mistakes and not args.derivations:
        raise ValueError("--mistakes: applies only to --derivations, so add it or leave --mistakes out")
    for name in ("only", "dtype") if args.derivations else ():
        if getattr(args, name):
            raise ValueError(f"--{name}: does not apply to --derivations, so leave one of the two out")
    if args.derivations and args.device not in ("cpu", "auto"):
        raise ValueError("--device: derivations are checked on the CPU, so leave it out")


def mutate(args: argparse.Namespace) -> None:
    from ..testing.mutate import mutate

    given = {"--json": args.json, "what follows --": args.others[1:]}
    if args.list and (without_effect := [name for name, value in given.items() if value]):
        raise ValueError(f"--list: runs nothing, so leave out {', '.join(without_effect)}")
    output = None if args.json is None else Path(args.json)
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ValueError(f"--json: expected a file in an existing folder, got {output}")
    options = {"helpers": args.helpers, "processes": args.jobs, "limit": args.limit, "seed": args.seed}
    if not mutate(args.names, args.others[1:], only_list=args.list, output=output, **options):
        sys.exit(1)


def show(args: argparse.Namespace) -> None:
    """Print the loops; exit status 2 means that the derivation cannot be compiled, for the reason that is printed."""
    from ..compiler import CompileError
    from ..compiler.show import shown
    from ..generation import printable

    op, op_backward = find_pair(args.name)
    try:
        print(printable(shown(op, op_backward, args.target)))
    except CompileError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2)


def site(args: argparse.Namespace) -> None:
    import webbrowser

    from ..shell.files import cache_dir
    from .site import unpack

    page = unpack(cache_dir() / "site" if args.to is None else Path(args.to))
    print(one_line(str(page)))
    if not args.no_open and not webbrowser.open(page.as_uri()):
        print("no browser could be started: open this file in one")


def find_pair(name: str) -> tuple[Any, Any]:
    """The operation that a name or FILE.py::FUNCTION stands for, and its backward, or None."""
    from .. import ops
    from ..compiler.in_place import IN_PLACE
    from ..training.snapshot import load_file

    file, separator, function = name.rpartition("::")
    module: Any = load_file(file) if separator else ops
    op = getattr(module, function, None) or {op.__name__: op for op in IN_PLACE}.get(name)
    known = [each for each in ops.__all__ if f"{each}_backward" in ops.__all__] + [op.__name__ for op in IN_PLACE]
    if not callable(op) or isinstance(op, type):
        where = (
            f"{file} has no function {function}" if separator else f"expected FILE.py::FUNCTION or {', '.join(known)}"
        )
        raise ValueError(f"{name}: {where}")
    return op, getattr(module, f"{function}_backward", None)


def generate(args: argparse.Namespace) -> None:
    from ..generation import printable, stream_texts
    from ..rng import Key
    from ..training.readers import load_writer

    options, prompts = sampling_options(args) | {"key": Key(args.seed)}, prompts_of(args)
    model, vocabulary = load_writer(args.run_folder, program=program_of(args), dtype=type_of(args))
    given = [each.encode("utf-8", "surrogateescape") for each in prompts]  # the bytes as typed, UTF-8 or not
    model, ends = placed(model, args), [as_typed(each) for each in args.stop]
    for start in range(0, len(given), TOGETHER):
        batch = given[start : start + TOGETHER]
        streamed = stream_texts(model, batch, args.tokens, vocabulary, ends, **options)
        first = next(streamed, [""] * len(batch))  # first, so that a bad option prints its error alone
        texts = [each.decode("utf-8", "replace") for each in batch]
        print(f"{SEPARATOR * (start > 0)}{printable(texts[0])}", end="", flush=True)
        for new in chain([first], streamed):
            print(printable(new[0]), end="", flush=True)  # the other texts come after it
            texts = [text + more for text, more in zip(texts, new, strict=True)]
        print("".join(f"\n{SEPARATOR}{printable(text)}" for text in texts[1:]))


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The texts to continue, from --prompt and --prompts."""
    prompts = list(args.prompt or [])
    if args.prompts is not None:
        lines = sys.stdin.read() if args.prompts == "-" else read_text(args.prompts)
        if not (lines := [line for line in lines.replace("\r\n", "\n").split("\n") if line]):
            raise ValueError(f"--prompts: expected lines to continue, got none in {args.prompts}")
        prompts += lines
    return prompts or ["\n"]


def chat(args: argparse.Namespace) -> None:
    """Answer the lines that are typed, or those of standard input, until Ctrl-D; Ctrl-C ends an answer."""
    from ..data import PublishedTokenizer
    from ..generation import Chat, ChatTemplate, printable
    from ..models.pretrained import instead_of_folder
    from ..rng import Key
    from ..training.readers import load_writer, published_files

    options, path = sampling_options(args), args.run_folder
    if (folder := published_files(path)) is None:
        wanted = "expected a published model with config.json, tokenizer.json and a chat template, or a run of one"
        raise ValueError(instead_of_folder(path) or f"{path}: {wanted}")
    template = ChatTemplate(folder)
    model, vocabulary = load_writer(path, args.context, dtype=type_of(args))
    assert isinstance(vocabulary, PublishedTokenizer)  # since there are its files
    system = None if args.system is None else as_typed(args.system)
    conversation = Chat(placed(model, args), vocabulary, template, system)
    typed, turn = sys.stdin.isatty(), 0
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401 (lines can then be edited)
        print("Ctrl-C ends an answer, Ctrl-D the conversation.")
    while (text := next_line("> " * typed)) is not None:
        if not text.strip():
            continue
        before, key = len(conversation.messages), Key(args.seed).fold(turn)
        answer, interrupts = conversation.answer(text, args.tokens, **options, key=key), list[int]()
        try:
            with signals_caught(partial(interrupt, interrupts)):
                for i, new in enumerate(answer):
                    print(printable(new if i else new.lstrip(" ")), end="", flush=True)
                    if interrupts:
                        answer.close()
            print()
        except ValueError as error:
            if not typed:
                raise
            print(f"error: {one_line(str(error))}", file=sys.stderr)
            continue
        turn += 1
        if forgotten := before + 2 - len(conversation.messages):
            print(f"the oldest {forgotten} messages were forgotten, to make room in the context", file=sys.stderr)


def next_line(question: str) -> str | None:
    """The next line of standard input; None at its end."""
    try:
        return as_typed(input(question))
    except EOFError:
        if question:
            print()
        return None


def interrupt(interrupts: list[int], number: int, frame: Any) -> None:
    """Note the first Ctrl-C; pass on any other signal, and the second."""
    if interrupts or number != signal.SIGINT:
        stop(number, frame)
    else:
        interrupts.append(number)


def program_of(args: argparse.Namespace) -> Any:
    """The module that --program becomes, or None."""
    from ..training.snapshot import load_file

    return None if args.program is None else load_file(args.program)


def translate(args: argparse.Namespace) -> None:
    from ..generation import printable
    from ..generation import translate as translated
    from ..parallel.ranks import Ranks
    from ..training.readers import load_translator
    from ..training.settings import read_settings

    run = Path(args.run_folder)
    with Ranks.find() as ranks:
        ranks.expect_same_program(sys.argv[1:])
        settings = ranks.from_first(lambda: read_settings(run if run.is_dir() else run.parent))
        model, subwords = load_translator(run, program_of(args))
        ranks.expect_same_bits("parameters", model.flat.data)
        names = ("beam", "length_penalty", "max_length")
        options: dict[str, Any] = {name: settings[name] for name in names if name in settings}
        lines = ranks.from_first(lambda: [as_typed(line) for line in args.sentences or map(str.strip, sys.stdin)])
        model = placed(model, args)
        sentences = [line for line in lines if line]  # a blank line of standard input gives a blank line
        translations = iter(translated(model, subwords, sentences, **options, ranks=ranks))
        for line in lines:
            print(printable(next(translations)) if line else "")


def evaluate(args: argparse.Namespace) -> None:
    from ..parallel.ranks import Ranks
    from ..training.settings import read_settings
    from ..training.start import find_program, open_run, score_lines

    run = Path(args.run_folder)
    with Ranks.find() as ranks:
        ranks.expect_same_program(sys.argv[1:])
        ranks.from_first(lambda: read_settings(run))  # what cannot be read is reported once
        program = find_program(run, args.program)
        opened = open_run(run, program, args.device, args.data, ranks)
        for line in score_lines(opened, program, args.part, partial(placed, args=args)):
            print(line)


def plot(args: argparse.Namespace) -> None:
    from .plots import plot_run, plot_runs

    if args.beside and args.program:
        raise ValueError("--program: only curves are drawn of several runs, so leave it out")
    run = Path(args.run_folder)
    for path in plot_runs([run, *map(Path, args.beside)]) if args.beside else plot_run(run, program_of(args)):
        print(one_line(str(path)))


def as_typed(text: str) -> str:
    """Text of the command line or standard input, decoded as UTF-8 where the locale (LC_ALL=C) could not."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


if __name__ == "__main__":
    main()
