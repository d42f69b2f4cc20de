"""Explicit-state model of the commit of a checkpoint, as `mcore_ckpt/directory/commit.py` does it.

    python commit_model.py            all checks, minutes              python commit_model.py -v      with all traces
    python commit_model.py --deep N   up to N states each

Processes are generators: each `yield` is one atomic operation. A process may be stopped after any of them for any time:
all interleavings are explored, breadth first, so a trace is a shortest one. A process that is never scheduled again has
crashed: from every state a later save `Z` runs alone, all others dead. It must succeed (nobody waits for ever) and
leave only its own files (nothing stays for ever). Data of all ranks: one file.

Files: M `.metadata`; C `common.pt`; idx:X the note of save X, which becomes M; next:T the claim on the token T; data:X;
pend:X `common.pt.X.pending`. M, idx and next hold (id, id of the base). FLAGS take rules of the protocol away.
"""

# ruff: noqa: E501, N818, SIM102
# mypy: ignore-errors

import sys
import time
from collections import deque

NONE, OLD = "none", "O"
FLAGS, LIMIT = frozenset(), int(sys.argv[sys.argv.index("--deep") + 1]) if "--deep" in sys.argv else 850_000


def on(flag):
    return flag in FLAGS


def own_of(name):
    return name.split(":")[1] if ":" in name else None  # the save whose file it is


def freeze(d):
    return tuple(sorted(d.items()))


# ------------------------------------------------------------------ the repaired protocol, POSIX
def saver(me):
    return (yield from begin(me, "commit"))


def failing(me):
    return (yield from begin(me, "fails"))  # an error after its claim: it goes back, or was completed


def walk(v, me=None):
    """The end of the chain of claims on v: (token, None), or (None, the living claim's save, or "" where v has passed)."""
    t = v
    while claim := (yield ("read", f"next:{t}")):
        if claim == me:
            return t, claim
        if (yield ("read", f"idx:{claim}")):
            return None, claim
        if (yield ("read", "M")) != v:
            return None, ""
        if not on("pending of a dead claim stays"):
            if not on("no sync of a dead claim"):
                yield ("sync",)
            yield ("unlink", f"pend:{claim}")
        if on("a dead claim is removed"):
            yield ("unlink", f"next:{t}")
        else:
            t = f"{t}/{claim}"
    return t, None


def begin(me, how):
    if not on("coarse"):
        yield ("create", (f"idx:{me}", (me, NONE)))  # 1: the note
    return ("settle_base", how, me)


def settle_base(how, me):
    v = yield ("read", "M")  # 2: the base
    t, claim = yield from walk(v)
    if t is None:
        return ("complete", claim, v, "settle_base", how, me) if claim else ("settle_base", how, me)
    if on("sweep at the start"):
        names = yield ("list",)
        yield ("unlink", *(n for n in names if own_of(n) not in (None, me, v)))
    if v != NONE and not on("base's common state is not completed"):
        if not on("no sync before 2"):
            yield ("sync",)
        yield from place_common(v)  # 2
    mine = [(f"data:{me}", (me,)), (f"pend:{me}", (me,))]
    if on("coarse"):
        mine.append((f"idx:{me}", (me, v)))
    for part in parts(mine):
        yield ("create", *part)
    if not on("coarse") and (yield ("overwrite", f"idx:{me}", (me, v))) == "ENOENT":  # another save has removed it
        return ("lost", me)
    return (how, me, v)


def fails(me, v):
    return (yield from commit(me, v, True))


def commit(me, v, fails=False):
    if not on("no sync before the claim"):
        yield ("sync",)
    names = yield ("list",)  # 4: all that the sweep (9) may remove
    while True:
        t, claim = yield from walk(v, me)
        if claim == me:
            break
        if t is None:
            return ("complete", claim, v, "lost", me) if claim else ("lost", me)
        if (yield ("claim", me, f"next:{t}")) == "ok":
            break
    now = yield ("read", "M")  # 6
    if now != v and not on("no second look"):
        if now != me:
            if t:
                yield ("unlink", f"next:{t}")
            return ("lost", me)
    if fails and now == v:
        if (yield ("unlink?", f"idx:{me}")) == "ok" or (yield ("read", "M")) != me:
            return ("lost", me)
    elif now == v:
        if not (yield from publish(me, v)):
            return ("lost", me)
    else:
        yield ("sync",)
    if fails:
        yield ("sync",)
    if (fails or now == me) and v != NONE:
        yield from place_common(me)
    yield ("report", "ok", me)  # 8
    if on("list after the publish"):
        names = yield ("list",)
    own = f"next:{t}" if t else None
    gone = [n for n in names if own_of(n) not in (None, me) and n != own] + ([own] if own else [])
    yield from unlink(gone)  # 9


def publish(x, v):
    first = v == NONE
    if first or on("common.pt first"):
        yield from place_common(x)
    done = (yield ("rename", f"idx:{x}", "M")) == "ok" or (yield ("read", "M")) == x
    if not done and not on("common state of one that failed"):
        return False
    if not on("no sync after the rename"):
        yield ("sync",)
    if not first:
        yield from place_common(x)
    return True


def place_common(x):
    yield ("rename", f"pend:{x}", "C")


def complete(other, v, *then):
    if (yield ("read", "M")) == v:
        yield from publish(other, v)
    return then


def lost(me):
    yield ("report", "lost", me)
    if not on("loser does not sync"):
        yield ("sync",)
    yield from unlink([f"idx:{me}", f"pend:{me}", f"data:{me}"])


def parts(names):
    return [names] if on("coarse") else [[each] for each in names]


def unlink(names):
    for part in parts(names):
        yield ("unlink", *part)


def reader(turns):
    """Ours: index, pending common state, then common.pt, data; begins again if the index has changed."""
    x = yield ("read", "M")
    if x == NONE or turns == 0:
        return
    common = (yield ("read", f"pend:{x}")) or (yield ("read", "C"))
    data = yield ("read", f"data:{x}")
    if common != x or data != x:
        if (yield ("read", "M")) == x:
            yield ("fail", f"a reader finds {x} in force, common state of {common}, data of {data}")
        return ("reader", turns - 1)


# ------------------------------------------------------------------ object store
def store_saver(me):
    """pend:X stays for as long as X is in force; common.pt is a copy for stock, and not looked at here."""
    v = yield ("read", "M")
    yield ("create", (f"pend:{me}", (me,)), (f"data:{me}", (me,)))
    names = yield ("list",)
    for _ in range(2):
        got = yield ("put", me, v)  # If-Match v, or If-None-Match *
        if got == "412" and on("412 is believed"):
            return ("lost", me)
        now = me if got == "ok" else (yield ("read", "M"))
        if now == me:
            yield ("report", "ok", me)
            if on("list after the publish"):
                names = yield ("list",)
            return (yield from unlink([n for n in names if own_of(n) not in (None, me)]))
        if now != v:
            return ("lost", me)  # v never comes back: no put that is on its way counts any more
    if on("gives up, and removes its files"):
        return ("lost", me)
    yield ("report", "undecided", me)  # raises; its files stay for the next save


# ------------------------------------------------------------------ the file system, or store
def execute(op, fs, lossy):
    """All outcomes of one operation: (answer, files after it). What is not synced yet is noted in `~log`."""
    kind, *args = op
    d = dict(fs)
    if not on("power"):
        return [(None, fs)] if kind == "sync" else [(a, freeze(n)) for a, n in outcomes(kind, args, d, lossy)]
    disk, log = d.pop("~log")[1]
    if kind == "sync":
        return [(None, freeze({**d, "~log": (0, (freeze(d), ()))}))]
    out = []
    for answer, n in outcomes(kind, args, dict(d), lossy):
        change = tuple((k, n.get(k)) for k in sorted({*d, *n}) if d.get(k) != n.get(k))
        out.append((answer, freeze({**n, "~log": (0, (disk, (*log, change) if change else log))})))
    return out


def outcomes(kind, args, d, lossy):
    here = d["M"][1][0] if "M" in d else NONE
    name = args[0] if args else None
    if kind == "read":
        return [(here if name == "M" else d[name][1][0] if name in d else None, d)]
    if kind == "list":
        return [(tuple(sorted(n for n in d if ":" in n)), d)]
    if kind == "create":
        for name, content in args:
            d[name] = (0, content)
        return [(None, d)]
    if kind == "overwrite":
        if name not in d:
            return [("ENOENT", d)]
        d[name] = (0, args[1])
        return [("ok", d)]
    if kind == "unlink":
        return [(None, {n: each for n, each in d.items() if n not in args})]
    if kind == "claim":
        name, to = args
        if to in d:
            return [("EEXIST", d)]
        d[to] = (0, (name, NONE))
        return [("ok", d)] + ([("EEXIST", d)] if lossy else [])
    if kind == "unlink?":
        if name not in d:
            return [("ENOENT", d)]
        d.pop(name)
        return [("ok", d)]
    if kind == "rename":  # lossy: it was done, the answer was lost, the client has tried again
        if name not in d:
            return [("ENOENT", d)]
        d[args[1]] = d.pop(name)
        return [("ok", d)] + ([("ENOENT", d)] if lossy else [])
    if kind == "put":  # an answer may be lost; what was not answered may still arrive
        wire = d.get("wire", (0, ()))[1]
        sent = {**d, "wire": (0, tuple(sorted({*wire, tuple(args)})))}
        done = {**d, "M": (0, tuple(args))}
        return [("ok", done), ("?", done), ("?", sent)] if here == args[1] else [("412", d), ("?", d)]
    raise ValueError(kind)


def after_power_cut(fs):
    """What may be found: any subset of what was not synced has reached the disk (a rename is there as a whole, or not)."""
    disk, log = dict(fs)["~log"][1]
    for mask in range(2 ** len(log)):
        d = dict(disk)
        for i, change in enumerate(log):
            for name, value in change if mask >> i & 1 else ():
                d.pop(name, None) if value is None else d.update({name: value})
        yield freeze({**d, "~log": (0, (freeze(d), ()))})


# ------------------------------------------------------------------ exploring
known, total = {}, 0


def settle(key):
    """Where a process is, as (program, arguments, answers so far), and its next operation; None at the end."""
    if (FLAGS, key) not in known:
        program = globals()[key[0]](*key[1])
        try:
            for answer in (None, *key[2]):
                op = program.send(answer)
            known[FLAGS, key] = (key, op)
        except StopIteration as end:
            known[FLAGS, key] = end.value and settle((end.value[0], tuple(end.value[1:]), ()))
    return known[FLAGS, key]


class Violation(Exception): ...


class Model:
    def __init__(self, starts, base, lossy, last):
        self.lossy, self.last, self.ended = lossy, last, set()
        common = f"pend:{base}" if last == "store_saver" else "C"
        files = {"M": (0, (base, NONE)), f"data:{base}": (1, (base,)), common: (2, (base,))}
        fs = {} if base == NONE else files
        if on("power"):
            fs["~log"] = (0, (freeze(fs), ()))
        # files, processes, (saves in the order in which they came into force, told "saved", told "lost")
        self.first = (
            freeze(fs),
            tuple(settle((name, (arg,), ())) for name, arg in starts),
            ((base,), frozenset(), frozenset()),
        )

    def judge(self, before, after, ghost, op):
        """The invariants of one transition; returns the ghost state after it."""
        force, ok, no = ghost
        d, was = dict(after), dict(before).get("M")
        now, old = d.get("M"), was[1][0] if was else NONE
        x, base = now[1] if now else (NONE, NONE)
        if op[0] == "fail":
            raise Violation("I1: " + op[1])
        if op[:2] == ("report", "ok"):
            ok |= {op[2]}
            if op[2] not in force:
                raise Violation(f"I2: {op[2]} is told that it has saved, and was never in force")
        elif op[:2] == ("report", "lost"):
            no |= {op[2]}
            if x == op[2]:
                raise Violation(f"I3: {x} is told that it has not saved, and is in force")
        elif was != now and now and op[0] != "power cut":
            force += (x,)
            if base != old:
                raise Violation(f"I3: {x}, based on {base}, comes into force over {old}: two have won")
            if x in no:
                raise Violation(f"I3: {x} comes into force after it was told that it has lost")
        if now:
            common = d["C"][1][0] if "C" in d else None
            if f"data:{x}" not in d:
                raise Violation(f"I1: {x} is in force, and its data files are gone")
            if f"pend:{x}" not in d and common != x and not x.islower():
                raise Violation(f"I1: {x} is in force, common.pt is of {common}, and its own is gone")
        return force, ok, no

    def end(self, fs):
        """All others are dead."""
        if fs in self.ended:
            return
        self.ended.add(fs)
        fs = tuple(each for each in fs if each[0] != "wire")
        at, ghost = settle((self.last, ("Z",), ())), ((), frozenset(), frozenset())
        for _ in range(300):
            if at is None:
                break
            (name, args, answers), op = at
            answer, new = (None, fs) if op[0] in ("report", "fail") else execute(op, fs, False)[0]
            ghost = self.judge(fs, new, ghost, op)
            fs, at = new, settle((name, args, (*answers, answer)))
        if at is not None or "Z" not in ghost[1]:
            raise Violation("I5: all others are dead, and a later save cannot succeed, ever")
        left = {n for n, _ in fs if own_of(n) not in (None, "Z")}
        if left:
            raise Violation(f"I4: left for ever: {', '.join(sorted(left))}")

    def after(self, state):
        """All (step, next state); raises `Violation` with the step in `self.step`."""
        fs, procs, ghost = state
        self.step = ("all", ("die",), None)
        for cut in after_power_cut(fs) if on("power") else (fs,):
            if on("power"):
                self.step = ("power", ("cut",), None)
                self.judge(fs, cut, ghost, ("power cut", ghost[0][-1]))
                told = max((i for i, x in enumerate(ghost[0]) if x in ghost[1]), default=None)
                if (
                    told is not None
                    and "M" in dict(fs)
                    and dict(cut).get("M", (0, (NONE,)))[1][0] not in ghost[0][told:]
                ):
                    raise Violation(f"I2: {ghost[0][told]} was told that it has saved, and is lost")
            self.end(cut)
        for who, at in enumerate(procs):
            if at is None:
                continue
            (name, args, answers), op = at
            for answer, new in [(None, fs)] if op[0] in ("report", "fail") else execute(op, fs, self.lossy):
                self.step = (f"process {who + 1}", op, answer)
                g = self.judge(fs, new, ghost, op)
                to = settle((name, args, (*answers, answer)))
                yield self.step, (new, (*procs[:who], to, *procs[who + 1 :]), g)
        for put in dict(fs).get("wire", (0, ()))[1]:  # arrives now, once
            d = dict(fs)
            d["wire"] = (0, tuple(w for w in d["wire"][1] if w != put))
            if (d["M"][1][0] if "M" in d else NONE) == put[1]:
                d["M"] = (0, put)
            self.step = ("network", ("a put arrives late:", *put), None)
            yield self.step, (freeze(d), procs, self.judge(fs, freeze(d), ghost, ("put",)))


def check(title, starts, flags=(), *, holds=True, base=OLD, lossy=False, last="saver", limit=LIMIT):
    global FLAGS, total
    FLAGS, began = frozenset(flags), time.time()
    model = Model(starts, base, lossy, last)
    came, queue, trace = {model.first: None}, deque([model.first]), None
    try:
        while queue and len(came) < limit:
            state = queue.popleft()
            for step, to in model.after(state):
                if to in came:
                    continue
                came[to] = (state, step)
                queue.append(to)
    except Violation as violation:
        trace, step = [str(violation)], model.step
        while step:
            trace.append(
                f"{step[0]}: {' '.join(map(str, step[1]))}" + (f" -> {step[2]}" if step[2] not in (None, "ok") else "")
            )
            state, step = came[state] or (None, None)
    total += len(came)
    verdict = "VIOLATED" if trace else "holds in ALL states" if not queue else "holds so far"
    wrong = "" if (trace is None) == holds else "   <-- NOT EXPECTED"
    print(f"{title:58}{len(came):>9,} states {time.time() - began:5.1f} s  {verdict}{wrong}", flush=True)
    if trace:
        print("       " + trace[0])
        for line in reversed(trace[1:]) if "-v" in sys.argv or wrong else ():
            print("           ", line)


def S(ids, program="saver"):
    return [(program, x) for x in ids]


def bad(title, starts, *flags, **how):
    check(title, starts, flags, holds=False, **how)


def main():
    R, store, s2 = [("reader", 2)], {"last": "store_saver"}, S("AB", "store_saver")
    f = [("failing", "F")]
    for base, what in ((OLD, "over a checkpoint"), (NONE, "empty directory")):
        check(f"2 savers, {what}", S("AB"), base=base)
        check(f"2 savers, {what}, answers lost", S("AB"), base=base, lossy=True)
        check(f"2 savers and a reader, {what}", S("AB") + R, base=base)
        check(f"saver, failing, {what}", S("A") + f, base=base)
        check(f"saver, failing, reader, {what}", S("A") + f + R, base=base)
        check(f"saver, failing, {what}, power", S("A") + f, {"power"}, base=base)
        check(f"2 savers, {what}, power cuts", S("AB"), {"power"}, base=base)
        check(f"2 savers, failing, {what}", S("AB") + f, {"coarse"}, base=base)
        check(f"3 savers, {what}", S("ABD"), {"coarse"}, base=base)
    for flag in (
        "base's common state is not completed",
        "sweep at the start",
        "list after the publish",
        "common.pt first",
        "no second look",
    ):
        bad(flag, S("AB"), flag)
    for base, what in ((OLD, "over a checkpoint"), (NONE, "empty")):
        check(f"store: 2 savers, {what}", s2, base=base, **store)
    check("store: 2 savers and a reader", s2 + R, **store)
    for flag in ("412 is believed", "gives up, and removes its files", "list after the publish"):
        bad(flag, s2, flag, **store)
    if LIMIT > 810_000:  # as many states does it take to find that one
        bad("a dead claim is removed", S("AB") + f, "a dead claim is removed", "coarse")
    bad(
        "pending of a dead claim stays",
        S("AB") + f,
        "pending of a dead claim stays",
        "coarse",
        base=NONE,
        limit=200_000,
    )
    bad("no sync of a dead claim", S("A") + f, "power", "no sync of a dead claim")
    bad("common state of one that failed", S("A") + f, "common state of one that failed")
    for flag in ("no sync before 2", "no sync before the claim", "no sync after the rename"):
        bad(flag, S("AB"), flag, "power")
    bad("loser does not sync", S("AB"), "loser does not sync", "power", base=NONE)
    print(f"\n{total:,} states")


if __name__ == "__main__":
    main()
