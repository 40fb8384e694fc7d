"""The runtime's sub-commands: `generate`, `chat` and `serve` (their lines run once per call of the command)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ostinato.engines.argument_parser import ArgumentParser

from .chat_session import ChatSession
from .config import add_arguments, config_from_args
from .generate_lines import GenerateLines
from .llm import LLM
from .request import SamplingParams
from .request_lines import read_requests
from .serve_options import config_of, serve_parser

BUNDLE_HELP = "a bundle's folder, such as engines/store/NAME"
MAX_ANSWER_TOKENS = 512  # a small model may never end its turn by itself


def generate(argv: list[str]) -> int:
    """`ostinato generate`: complete prompts offline; exit 1 if a choice failed."""
    parser = ArgumentParser(prog="ostinato generate", description="Complete prompts, without a server.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help=BUNDLE_HELP)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to go on from (not a chat: see `ostinato chat`)")
    source.add_argument("--prompt-ids", metavar="IDS", help="token ids to go on from, separated by commas")
    source.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help="one JSON object a line, with a prompt or messages; - is standard input",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt instead of text")
    parser.add_argument(
        "--dump-logits",
        type=Path,
        metavar="FILE",
        help="write the logits after every prompt token there: .npy, float32, [positions, vocabulary]",
    )
    _add_sampling(parser, temperature=1.0, top_p=1.0)
    add_arguments(parser)
    args = parser.parse_args(argv)
    requests = read_requests(args.prompt, args.prompt_ids, args.requests, _params(args))
    lines = GenerateLines(args.bundle, config_from_args(args), dump_logits=args.dump_logits)
    return lines.run(requests, as_json=args.json)


def chat(argv: list[str]) -> int:
    """`ostinato chat`: a conversation in the terminal, or one streamed answer with --prompt."""
    parser = ArgumentParser(prog="ostinato chat", description="Chat with a bundle in the terminal.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help=BUNDLE_HELP)
    parser.add_argument(
        "--prompt", metavar="TEXT", help="answer this and end (default: ask for one turn after another)"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message (default: what the chat template says)")
    _add_sampling(parser, temperature=0.2, top_p=0.9, max_tokens=MAX_ANSWER_TOKENS)
    add_arguments(parser)
    args = parser.parse_args(argv)
    with LLM(args.bundle, config_from_args(args)) as llm:
        session = ChatSession(llm, _params(args), args.system)
        if args.prompt is not None:
            session.ask(args.prompt)
        else:
            session.converse(sys.stdin)
    return 0


def serve(argv: list[str]) -> int:
    """`ostinato serve`: the OpenAI-compatible server, until SIGTERM or Ctrl-C."""
    from .server import serve as run_server  # the other commands do without the web stack

    return run_server(config_of(serve_parser().parse_args(argv)))


def _add_sampling(
    parser: argparse.ArgumentParser, *, temperature: float, top_p: float, max_tokens: int | None = None
) -> None:
    group = parser.add_argument_group("sampling")
    default = "the rest of the context" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"tokens to make (default: {default})"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 takes the likeliest (default: {temperature})",
    )
    group.add_argument("--greedy", action="store_true", help="the same as --temperature 0")
    group.add_argument(
        "--top-p",
        type=float,
        default=top_p,
        metavar="P",
        help=f"sample of the likeliest that make up P (default: {top_p})",
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample of the K likeliest (default: 0, of all)"
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="leave out what is under P times the likeliest (default: 0)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same tokens on every run (default: others each time)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given four times"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens, whatever the model says")


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if args.greedy else args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
