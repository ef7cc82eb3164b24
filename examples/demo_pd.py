"""`make demo-pd`: prefill and decode on two servers behind a door. Exits with 0 if the text equals
that of one server."""

from __future__ import annotations

import signal
import sys
import urllib.error
from pathlib import Path
from typing import NoReturn

from demo_pd_report import draw_timeline, show
from demo_pd_servers import PdServers
from demo_requests import Answer, ask, read_source, run_stream
from rich.console import Console
from rich.markup import escape

from kvspec_testkit.servers.server_process import ServerStartError
from kvspec_testkit.servers.transfer_report import read_transfer_report

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "models" / "demo-5m"
FOLDER = REPOSITORY / ".kvspec" / "demo-pd"
TIMELINE = FOLDER / "timeline.png"

# Name, source file and least number of tokens of each prompt.
PROMPTS = (
    ("1K", ("aiohttp", "web_response.py"), 1000),
    ("2K", ("aiohttp", "client_reqrep.py"), 2000),
    ("4K", ("networkx", "classes/graph.py"), 4000),
)
NEW_TOKENS = 96
STREAM = ("aiohttp", "multipart.py")


def main() -> int:
    signal.signal(signal.SIGTERM, _exit_on_signal)
    console = Console()
    try:
        with PdServers(MODEL, FOLDER) as servers:
            servers.wait_healthy(console)
            return run(console, servers)
    except ServerStartError as error:
        console.print(f"[red]{escape(str(error))}")
    except urllib.error.HTTPError as error:
        console.print(f"[red]A request failed: {error.code} {escape(error.read().decode())}")
        console.print(f"The servers' logs are in {FOLDER}.")
    except KeyboardInterrupt:
        console.print("interrupted; the servers are stopped")
        return 130
    return 1


def run(console: Console, servers: PdServers) -> int:
    """Send the same requests to the door and to the ordinary server, and show the results."""
    disagg, alone = {}, {}
    for name, source, num_tokens in PROMPTS:
        prompt = read_source(MODEL, *source, num_tokens)
        for where, url, answers in (
            ("disaggregated", servers.door_url, disagg),
            ("one server", servers.ordinary_url, alone),
        ):
            with console.status(f"generating {NEW_TOKENS} tokens after the {name} prompt, {where}"):
                answers[name] = ask(url, prompt, NEW_TOKENS)
            console.print(f"  {name}, {where}: {answers[name].elapsed_s:.1f} s")
    prompt = read_source(MODEL, *STREAM, num_tokens=1000)
    with console.status("streaming through the OpenAI client"):
        texts = [
            run_stream(url, str(MODEL), prompt).outputs["stream"]
            for url in (servers.door_url, servers.ordinary_url)
        ]
    same = {name: disagg[name].text == alone[name].text for name in disagg}
    same["OpenAI stream"] = texts[0] == texts[1]
    return report(console, disagg, same)


def report(console: Console, disagg: dict[str, Answer], same: dict[str, bool]) -> int:
    reports = {name: read_transfer_report(answer.meta_info) for name, answer in disagg.items()}
    show(console, disagg, reports)
    longest = max(disagg, key=lambda name: disagg[name].num_prompt_tokens)
    draw_timeline(TIMELINE, reports[longest], disagg[longest])
    console.print(f"Timeline of the longest prompt: {TIMELINE}", soft_wrap=True)
    differing = [name for name, equal in same.items() if not equal]
    if differing:
        console.print(f"[red]These texts differ from those of one server: {', '.join(differing)}.")
        return 1
    console.print(
        f"[green]All {len(same)} texts equal those of one server, character by character."
    )
    return 0


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    # SystemExit is an exception, so that the running servers are stopped.
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
