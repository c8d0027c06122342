"""Each Lua script alone, through a plain redis-py client: what its header says is what it does.

Every call here is made as a user who may touch the call's own KEYS and channels and nothing else,
and is followed by a look at their expiry (I8).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from fencekit import _scripts
from fencekit._lease import Lease, Subject
from fencekit._scripts import SCRIPTS, Call
from fencekit.events import Listeners
from fencekit.keys import KeySpace
from fencekit.testing import RedisServer

KEYS = KeySpace()
LOCK, FENCE, JOB, JOBFENCE = KEYS.lock("a"), KEYS.fence("a"), KEYS.job("a"), KEYS.job_fence("a")
FREE, DONE = KEYS.free_channel("a"), KEYS.done_channel("a")
OP = KEYS.once("a", "1f")
LEASE, TTL, RETENTION = 5_000, 60_000, 600_000
CHANNEL = re.compile(rb"fencekit:\{.+\}:(free|done)")


def ours(key: bytes) -> bool:
    """Whether fencekit made this key."""
    try:
        return bool(KEYS.name_of(key))
    except ValueError:
        return False


class Scripts:
    """Runs scripts as a user who may do no more than each call declares."""

    def __init__(self, server: RedisServer, *, watched: bool = True) -> None:
        self._watched = watched
        self._attempts = itertools.count()
        options: dict[str, Any] = {"protocol": 2, "decode_responses": False}
        self.admin = server.client(**options)
        self.admin.flushall()
        self.admin.execute_command("ACL", "SETUSER", "runner", "on", "nopass", "+@all")
        for script in SCRIPTS.values():
            assert self.admin.script_load(script.source) == script.digest
        self.runner = server.client(username="runner", password="any", **options)

    def close(self) -> None:
        self.admin.execute_command("ACL", "DELUSER", "runner")
        self.runner.close()
        self.admin.close()

    def run(self, name: str, keys: list[bytes], *args: Any) -> Any:
        """The script's reply."""
        if not self._watched:
            return self.admin.evalsha(SCRIPTS[name].digest, len(keys), *keys, *args)
        channels = [b"&" + arg for arg in args if isinstance(arg, bytes) and CHANNEL.match(arg)]
        allowed = ["resetkeys", "resetchannels", *(b"~" + key for key in keys), *channels]
        self.admin.execute_command("ACL", "SETUSER", "runner", *allowed)
        eternal = {key for key in keys if self.admin.pttl(key) == -1}
        reply = self.runner.evalsha(SCRIPTS[name].digest, len(keys), *keys, *args)
        for key in keys:  # I8
            assert self.admin.pttl(key) != -1 or key in eternal or not ours(key)
        return reply

    # One method for each script, its arguments in the header's order

    def acquire(
        self, nonce: str = "n1", owner: str = "me", *, lease: int = LEASE, delay: int = 0
    ) -> Any:
        args = (owner, f"host/1/{owner}", nonce, lease, RETENTION, delay)
        return self.run("acquire", [LOCK, FENCE], *args)

    def renew(self, *leases: tuple[Any, ...]) -> Any:
        """Each lease: its kind, owner and token, and if need be its length and delay."""
        keys, args = [], []
        for kind, owner, token, *rest in leases:
            lease, delay = (*rest, *(LEASE, 0)[len(rest) :])
            keys += [JOB, JOBFENCE] if kind == "job" else [LOCK, FENCE]
            args += [kind, owner, token, lease, RETENTION, delay]
        return self.run("renew", keys, *args)

    def release(self, owner: str, token: Any) -> Any:
        return self.run("release", [LOCK], owner, token, "", 0, FREE)

    def give_up(self, nonce: str, spent: int = 30_000) -> Any:
        return self.run("release", [LOCK], "", "", nonce, spent, FREE)

    def break_(self, reason: str = "broken") -> Any:
        return self.run("break", [LOCK, FENCE], reason, RETENTION, RETENTION, FREE)

    def inspect(self) -> Any:
        return self.run("inspect", [LOCK, FENCE], FREE)

    def begin(
        self, nonce: str = "n1", owner: str = "me", *, lease: int = LEASE, fingerprint: str = "",
        most: int = 0, blocks: bool = False, mode: Any = "",
    ) -> Any:  # fmt: skip
        keys = [JOB, JOBFENCE, LOCK, FENCE] if mode in ("take", "free") else [JOB, JOBFENCE]
        args = (owner, f"host/1/{owner}", nonce, TTL, lease, fingerprint, most, int(blocks))
        return self.run("begin", keys, *args, RETENTION, mode)

    def settle(
        self, owner: str, token: Any, state: str = "d", kept: bytes | None = None, *, ttl: int = 0,
        lock: bool = False,
    ) -> Any:  # fmt: skip
        keys = [JOB, LOCK] if lock else [JOB]
        args = (owner, token, state, int(kept is not None), kept or b"", ttl, DONE, FREE)
        return self.run("settle", keys, *args)

    def unclaim(self, nonce: str, *, lock: bool = False) -> Any:
        return self.run("unclaim", [JOB, LOCK] if lock else [JOB], nonce, 30_000, DONE, FREE)

    def job(self) -> Any:
        return self.run("job", [JOB])

    def clear(self, what: str = "clear", kept: bytes | None = None, *, ttl: int = 0) -> Any:
        return self.run("clear", [JOB], what, int(kept is not None), kept or b"", ttl, DONE)

    def gate(
        self, kind: str, token: Any, *commands: tuple[Any, ...], op: bytes = b"",
        remember: int = 30_000,
    ) -> Any:  # fmt: skip
        op = op or KEYS.once("a", f"{next(self._attempts):x}")
        fences = [FENCE, op, FENCE] if kind == "lock" else [JOBFENCE, op, JOB]
        keys = [*fences, *{words[1] for words in commands}]
        words = itertools.chain.from_iterable((len(words), *words) for words in commands)
        return self.run("gate", keys, kind, token, RETENTION, remember, *words)

    def fence(self, kind: str = "lock") -> Any:
        return self.run("fence", [FENCE, FENCE] if kind == "lock" else [JOBFENCE, JOB], kind)

    # The server's state

    def now(self) -> int:
        """Its clock in microseconds."""
        seconds, micros = self.admin.time()
        return int(seconds) * 1_000_000 + int(micros)

    def record(self, key: bytes) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.admin.hgetall(key).items()}

    def lapse(self) -> None:
        """The claim's lease has run out."""
        assert self.admin.hset(JOB, "l", "1") == 0

    def contents(self) -> dict[bytes, Any]:
        return {key: self.admin.dump(key) for key in self.admin.scan_iter()}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def scripts(server: RedisServer) -> Iterator[Scripts]:
    scripts = Scripts(server)
    yield scripts
    scripts.close()


# Headers


FILES = {path.name[:-4]: path for path in (files("fencekit") / "lua").iterdir()}
ENTRY = re.compile(r"(KEYS|ARGV)\[([^\]]+)\]")
TOKEN = re.compile(r"(?:(?:(\d+) ?\*? ?)?(i|at))?(?: ?([+-])? ?(\d+))?")
START = {"renew": lambda i: 6 * i - 5, "gate": lambda i: 5}
"""Where a body that walks through its arguments begins: what its variable `at` is for part i."""


def header_of(name: str) -> str:
    """The comment at the top of a script."""
    lines = itertools.takewhile(
        lambda line: line.startswith("--"), FILES[name].read_text("utf-8").splitlines()
    )
    return "\n".join(line[2:].strip() for line in lines)


def index(text: str, i: int, name: str) -> int:
    """The number that an index like 3, 2i-1 or at + 1 stands for in part i of the arguments."""
    match = TOKEN.fullmatch(text.strip())
    assert match is not None, f"{name}: cannot read the index {text!r}"
    factor, variable, sign, rest = match.groups()
    value = 0
    if variable is not None:
        value = int(factor or 1) * (i if variable == "i" else START[name](i))
    return value + int(rest or 0) * (-1 if sign == "-" else 1)


def named(name: str) -> tuple[set[tuple[str, int]], dict[str, int]]:
    """What a header declares: its KEYS and ARGV, and from where on either goes on without end."""
    declared, endless = set(), {}
    for kind, text in ENTRY.findall(header_of(name)):
        if text.endswith("..."):
            endless[kind] = int(text[:-3])
        else:
            declared |= {(kind, index(text, i, name)) for i in (1, 2)}
    return declared, endless


def used(name: str) -> set[tuple[str, int]]:
    """What a body uses, by itself or through the prelude's functions."""
    code = re.sub(r"--.*", "", FILES[name].read_text("utf-8"))
    found = set()
    for kind, text in ENTRY.findall(code):
        if "index" not in text:  # a local function's parameter: its callers are in this file
            found |= {(kind, index(text, i, name)) for i in (1, 2)}
    for text in re.findall(r"\b(?:lock_at|fence_at|fields|foreign)\((\d+)", code):
        found.add(("KEYS", int(text)))
    return found


def test_every_file_is_a_script_that_is_loaded() -> None:
    assert set(FILES) - {"_prelude"} == set(SCRIPTS)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_header_says_what_it_is_for_its_keys_arguments_and_returns(name: str) -> None:
    header = header_of(name)
    purpose, _, contract = header.partition("\n\n")
    assert len(purpose) > 20
    assert re.match(r"KEYS\[1\] |KEYS\[2i-1\] ", contract)
    assert re.search(r"^ARGV(\[|\s+none$)", contract, re.M)
    assert re.search(r"^Returns \S", contract, re.M)
    order = [contract.index(word) for word in ("KEYS[", "ARGV", "\nReturns")]
    assert order == sorted(order)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_body_uses_the_keys_and_arguments_that_the_header_names(name: str) -> None:
    declared, endless = named(name)
    body = used(name)
    rest = {(kind, number) for kind, number in body if number >= endless.get(kind, 10**9)}
    assert body - rest <= declared
    unused = declared - body
    assert unused <= ({("KEYS", 3), ("KEYS", 4)} if name == "gate" else set())
    assert bool(rest) == ("ARGV" in endless)


def calls() -> dict[str, list[Call]]:
    """What each builder makes, with and without what may be left out."""
    lease = Lease("a", 7, 5.0, 0.0, (), Listeners(), retention=600.0, delay=1.0)
    lock = Subject("lock", LOCK, FENCE, b"me", 7)
    job = Subject("job", JOB, JOBFENCE, b"me", 7)
    terms: dict[str, Any] = {
        "owner": b"me", "by": b"host/1/me", "nonce": b"1f", "ttl": 60.0, "lease": 5.0,
        "fingerprint": b"", "max_attempts": 0, "blocks": False, "retention": 600.0,
    }  # fmt: skip
    end: dict[str, Any] = {
        "owner": b"me", "state": b"d", "ttl": None, "done": DONE, "free": FREE,
    }  # fmt: skip
    gate: dict[str, Any] = {"kind": b"lock", "token": 7, "retention": 600.0, "remember": 30.0}
    resolve: dict[str, Any] = {"resolve": True, "kept": b"{}", "ttl": 60.0, "done": DONE}
    return {
        "acquire": [
            _scripts.acquire(
                LOCK, FENCE, owner=b"me", by=b"host/1/me", nonce=b"1f", ttl=5.0, retention=600.0,
                delay=delay,
            ) for delay in (0.0, 1.0)
        ],
        "renew": [_scripts.renew([(lease, lock), (lease, job)][:n]) for n in (1, 2)],
        "release": [
            _scripts.release(LOCK, FREE, owner=b"me", token=7),
            _scripts.release(LOCK, FREE, nonce=b"1f", spent=30.0),
        ],
        "break": [
            _scripts.break_(LOCK, FENCE, FREE, reason=b"r", retention=600.0, remember=600.0)
        ],
        "inspect": [_scripts.inspect(LOCK, FENCE, FREE)],
        "begin": [
            _scripts.begin([JOB, JOBFENCE], mode=b"", **terms),
            _scripts.begin([JOB, JOBFENCE, LOCK, FENCE], mode=b"take", **terms),
            _scripts.begin([JOB, JOBFENCE, LOCK, FENCE], mode=b"free", **{**terms, "lease": None}),
        ],
        "settle": [
            _scripts.settle([JOB], token=7, kept=None, **end),
            _scripts.settle([JOB, LOCK], token=None, kept=b"{}", **end),
        ],
        "unclaim": [
            _scripts.unclaim(keys, nonce=b"1f", spent=30.0, done=DONE, free=FREE)
            for keys in ([JOB], [JOB, LOCK])
        ],
        "job": [_scripts.job(JOB)],
        "clear": [
            _scripts.clear(JOB, **resolve),
            _scripts.clear(JOB, resolve=False, kept=None, ttl=None, done=DONE),
        ],
        "gate": [
            _scripts.gate([FENCE, OP, FENCE], commands=[], **gate),
            _scripts.gate([FENCE, OP, FENCE, b"k"], commands=[(b"SET", b"k", b"v")], **gate),
        ],
        "fence": [_scripts.fence([FENCE, FENCE], kind=b"lock")],
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_builder_makes_the_keys_and_arguments_that_the_header_names(name: str) -> None:
    declared, endless = named(name)
    contract = header_of(name)
    keys = max(number for kind, number in declared if kind == "KEYS")
    args = max([number for kind, number in declared if kind == "ARGV"], default=0)
    for call in calls()[name]:
        assert call.script is SCRIPTS[name]
        if name == "renew":
            leases = len(call.keys) // 2
            assert (len(call.keys), len(call.args)) == (2 * leases, 6 * leases)
            continue
        assert len(call.args) == args or ("ARGV" in endless and len(call.args) > args)
        if "only with a lock" in contract:
            assert len(call.keys) in (keys, keys // 2)
        else:
            assert len(call.keys) == keys or ("KEYS" in endless and len(call.keys) > keys)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_only_keys_are_passed_as_keys_and_no_key_as_an_argument(name: str) -> None:
    # scenario 49
    for call in calls()[name]:
        for key in call.keys:
            assert key == b"k" or not CHANNEL.match(key)
            assert key == b"k" or ours(key)
        arguments = [] if name == "gate" else call.args
        assert [arg for arg in arguments if ours(arg) and not CHANNEL.match(arg)] == []
        assert all(isinstance(word, bytes) for word in (*call.keys, *call.args))


def test_a_call_packs_itself_as_redis_py_would(scripts: Scripts) -> None:
    call = calls()["acquire"][0]
    connection = scripts.admin.connection_pool.connection_class()
    words = ("EVALSHA", call.script.digest, len(call.keys), *call.keys, *call.args)
    assert call.packed() == b"".join(connection.pack_command(*words))


def test_the_user_of_these_tests_may_really_touch_nothing_else(scripts: Scripts) -> None:
    scripts.acquire()
    with pytest.raises(NoPermissionError):
        scripts.runner.get(JOB)
    with pytest.raises(ResponseError, match=r"(?i)permission|ACL|access"):
        scripts.runner.eval("return redis.call('GET', ARGV[1])", 0, JOB)
    with pytest.raises(NoPermissionError):
        scripts.runner.publish(DONE, "1")


# Locks


def test_acquire_grants_with_the_servers_clock_as_token(scripts: Scripts) -> None:
    before = scripts.now()
    reply = scripts.acquire()
    assert reply == [1, scripts.admin.get(FENCE)]
    assert before <= int(reply[1]) <= scripts.now()
    record = scripts.record(LOCK)
    assert int(record.pop("since")) - int(record["token"]) < 1_000_000
    assert record == {
        "owner": "me",
        "token": reply[1].decode(),
        "by": "host/1/me",
        "nonce": "n1",
    }
    assert LEASE - 1000 < scripts.admin.pttl(LOCK) <= LEASE
    assert RETENTION - 1000 < scripts.admin.pttl(FENCE) <= RETENTION


def test_acquire_refuses_and_says_who_holds_it_for_how_long(scripts: Scripts) -> None:
    # I2
    _, token = scripts.acquire()
    before = scripts.contents()
    refused, left, *rest = scripts.acquire("n2", "you")
    assert refused == 0
    assert LEASE - 1000 < left <= LEASE
    assert rest == [b"me", token, b"host/1/me"]
    assert scripts.contents() == before
    scripts.admin.persist(LOCK)
    assert scripts.acquire("n2", "you")[:2] == [0, -1]


def test_acquire_by_the_same_owner_is_another_acquisition(scripts: Scripts) -> None:
    scripts.acquire("n1", "me")
    assert scripts.acquire("n2", "me")[0] == 0


def test_acquire_again_by_the_same_attempt_is_the_same_grant_counted_anew(scripts: Scripts) -> None:
    # scenario 47, I7
    granted = scripts.acquire()
    scripts.admin.pexpire(LOCK, 100)
    assert scripts.acquire() == granted
    assert scripts.admin.pttl(LOCK) > LEASE - 1000
    assert scripts.admin.get(FENCE) == granted[1]


def test_acquire_after_its_attempt_was_given_up_takes_nothing(scripts: Scripts) -> None:
    # I7, I10
    assert scripts.give_up("n1") == b"it lapsed"
    assert scripts.acquire("n1") == [-1]
    assert scripts.record(LOCK) == {"nonce": "n1"}
    assert scripts.acquire("n2")[0] == 1
    assert scripts.give_up("n2") == 1
    assert scripts.acquire("n2") == [-1]
    assert scripts.acquire("n3")[0] == 1


def test_acquire_with_a_delay_keeps_the_name_back_after_the_lease(scripts: Scripts) -> None:
    scripts.acquire(delay=10_000)
    assert LEASE + 9_000 < scripts.admin.pttl(LOCK) <= LEASE + 10_000
    until = int(scripts.record(LOCK)["until"])
    assert 0 < until - scripts.now() // 1000 <= LEASE
    scripts.admin.hset(LOCK, "until", "1")
    assert scripts.acquire("n2", "you")[0] == 0
    assert scripts.acquire("n1", delay=10_000)[0] == 1
    assert int(scripts.record(LOCK)["until"]) > scripts.now() // 1000


def test_every_grant_is_above_whatever_the_fence_holds(scripts: Scripts) -> None:
    # I1
    ahead = scripts.now() + 3_600_000_000
    scripts.admin.set(FENCE, ahead, px=TTL)
    assert scripts.acquire() == [1, b"%d" % (ahead + 1)]


def test_tokens_near_the_end_of_53_bits_are_exact(scripts: Scripts) -> None:
    token = 2**53 - 10
    scripts.admin.set(FENCE, token, px=TTL)
    for grant in range(1, 4):
        exact = b"%d" % (token + grant)
        assert scripts.acquire(f"n{grant}") == [1, exact]
        assert scripts.admin.get(FENCE) == exact
        assert scripts.record(LOCK)["token"] == exact.decode()
        assert scripts.fence() == exact
        assert scripts.inspect()[:3] == [exact, b"me", exact]
        assert scripts.renew(("lock", "me", exact)) == [1]
        assert scripts.release("me", b"%d" % (token + grant + 1)) != 1
        assert scripts.gate("lock", token + grant - 1) == [0, exact]
        assert scripts.release("me", exact) == 1
    assert scripts.break_() == [b"%d" % (token + 4)]
    assert scripts.gate("lock", token + 5, (b"SET", b"k", b"v")) == [1, b"%d" % (token + 5), b"OK"]
    assert scripts.begin(mode="take") == [b"begun", 1, b"%d" % (token + 6)]
    assert scripts.record(JOB)["t"] == str(token + 6)
    assert scripts.gate("job", token + 7) == [1, b"%d" % (token + 7)]
    assert scripts.fence("job") == b"%d" % (token + 7)


def test_release_gives_back_and_wakes_waiters(scripts: Scripts) -> None:
    _, token = scripts.acquire()
    with scripts.admin.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(FREE)
        channel.get_message(timeout=5)
        assert scripts.release("me", token) == 1
        message = channel.get_message(timeout=5)
    assert message is not None
    assert message["data"] == b"1"
    assert not scripts.admin.exists(LOCK)


def test_release_says_why_there_is_nothing_to_give_back(scripts: Scripts) -> None:
    # I7
    _, token = scripts.acquire()
    scripts.release("me", token)
    assert scripts.release("me", token) == b"it lapsed"
    _, other = scripts.acquire("n2", "you")
    before = scripts.contents()
    for owner, number in (("me", token), ("you", token), ("me", other), ("you", "1")):
        assert scripts.release(owner, number) == b"taken over by host/1/you"
    assert scripts.give_up("n1") == b"taken over by host/1/you"
    assert scripts.contents() == before
    scripts.break_("its host is gone")
    assert scripts.release("you", other) == b"broken: its host is gone"
    assert scripts.release("me", token) == b"it lapsed"


def test_giving_up_remembers_the_nonce_only_for_a_while(scripts: Scripts) -> None:
    # I8, I10
    scripts.acquire("n1")
    assert scripts.give_up("n1", 20_000) == 1
    assert scripts.record(LOCK) == {"nonce": "n1"}
    assert 0 < scripts.admin.pttl(LOCK) <= 20_000
    assert scripts.inspect() == [scripts.admin.get(FENCE)]
    scripts.acquire("n2")
    assert scripts.give_up("n2", 0) == 1
    assert not scripts.admin.exists(LOCK)


def test_break_raises_the_fence_first_and_tells_the_holder_why(scripts: Scripts) -> None:
    # I3
    (raised,) = scripts.break_()
    assert scripts.admin.get(FENCE) == raised
    _, token = scripts.acquire()
    assert int(token) > int(raised)
    with scripts.admin.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(FREE)
        channel.get_message(timeout=5)
        raised, *holder = scripts.break_("hung")
        assert channel.get_message(timeout=5) is not None
    assert int(raised) > int(token)
    assert holder == [b"me", token, b"host/1/me"]
    assert scripts.admin.get(FENCE) == raised
    assert scripts.record(LOCK) == {"evicted": token.decode(), "reason": "hung"}
    assert scripts.renew(("lock", "me", token)) == [b"broken: hung"]
    assert scripts.gate("lock", token) == [0, raised]
    assert len(scripts.break_()) == 1
    assert scripts.acquire("n2")[0] == 1


def test_break_is_above_a_clock_that_went_back(scripts: Scripts) -> None:
    ahead = scripts.now() + 3_600_000_000
    scripts.admin.set(FENCE, ahead, px=TTL)
    assert scripts.break_() == [b"%d" % (ahead + 1)]


def test_inspect_reads_and_changes_nothing(scripts: Scripts) -> None:
    assert scripts.inspect() == [b"0"]
    assert scripts.contents() == {}
    _, token = scripts.acquire()
    scripts.admin.hincrby(LOCK, "since", -2_000_000)
    before = scripts.contents()
    with scripts.admin.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(FREE)
        channel.get_message(timeout=5)
        fence, owner, number, label, age, left, waiting = scripts.inspect()
    assert (fence, owner, number, label) == (token, b"me", token, b"host/1/me")
    assert 2_000 <= int(age) < 4_000
    assert 0 < int(left) <= LEASE
    assert waiting == 1
    assert scripts.contents() == before
    assert scripts.inspect()[-1] == 0


def test_inspect_counts_the_time_left_without_the_delay(scripts: Scripts) -> None:
    scripts.acquire(delay=60_000)
    assert 0 < int(scripts.inspect()[5]) <= LEASE


def test_renew_extends_and_may_be_repeated(scripts: Scripts) -> None:
    # I7
    _, token = scripts.acquire()
    scripts.admin.pexpire(LOCK, 100)
    scripts.admin.pexpire(FENCE, 100)
    for _ in range(2):
        assert scripts.renew(("lock", "me", token)) == [1]
    assert scripts.admin.pttl(LOCK) > LEASE - 1000
    assert scripts.admin.pttl(FENCE) > RETENTION - 1000


def test_renew_shortens_a_lease_only_when_it_was_asked_for_exactly(scripts: Scripts) -> None:
    _, token = scripts.acquire(delay=10_000)
    assert scripts.renew(("lock", "me", token, 1_000, 2_000)) == [1]
    assert scripts.admin.pttl(LOCK) > LEASE + 9_000
    assert int(scripts.record(LOCK)["until"]) > scripts.now() // 1000 + LEASE - 1_000
    assert scripts.renew(("exact", "me", token, 1_000, 2_000)) == [1]
    assert 2_000 < scripts.admin.pttl(LOCK) <= 3_000
    assert int(scripts.record(LOCK)["until"]) <= scripts.now() // 1000 + 1_000
    _, _, claimed = scripts.begin()
    assert scripts.renew(("job", "me", claimed, 1_000)) == [1]
    assert scripts.admin.pttl(JOB) > TTL - 1_000


def test_renew_brings_back_a_fence_that_was_evicted(scripts: Scripts) -> None:
    # I3
    _, token = scripts.acquire()
    scripts.admin.delete(FENCE)
    assert scripts.renew(("lock", "me", token)) == [1]
    assert scripts.fence() == token


def test_renew_says_why_a_lock_is_lost_and_never_creates_one(scripts: Scripts) -> None:
    # scenario 46
    lost = [b"the server has no such lease any more"]
    assert scripts.renew(("lock", "me", "7")) == lost
    _, token = scripts.acquire()
    scripts.give_up("n1")
    assert scripts.renew(("lock", "me", token)) == lost
    _, other = scripts.acquire("n2", "you")
    before = scripts.contents()
    for owner, number in (("me", token), ("you", token), ("me", other)):
        assert scripts.renew(("lock", owner, number)) == [b"taken over by host/1/you"]
    assert scripts.contents() == before
    scripts.admin.set(FENCE, int(other) + 1, px=TTL)
    assert scripts.renew(("lock", "you", other)) == [b"fenced out by token %d" % (int(other) + 1)]
    scripts.admin.set(FENCE, "x", px=TTL)
    assert scripts.renew(("lock", "you", other)) == [b"something else is at its fence"]
    scripts.admin.set(LOCK, "x", px=TTL)
    assert scripts.renew(("lock", "you", other)) == [b"something else is at its key"]
    scripts.admin.delete(LOCK, FENCE)
    _, token = scripts.acquire("n3", delay=60_000)
    scripts.admin.hset(LOCK, "until", "1")
    assert scripts.renew(("lock", "me", token, LEASE, 60_000)) == [b"the lease ran out"]


def test_renew_answers_for_each_lease_of_a_batch(scripts: Scripts) -> None:
    _, token = scripts.acquire()
    _, _, claimed = scripts.begin()
    lost = b"taken over by host/1/me"
    batch = [("lock", "me", token), ("lock", "you", token), ("job", "me", claimed)]
    assert scripts.renew(*batch, ("job", "you", claimed)) == [1, lost, 1, lost]


def test_renew_extends_a_claim_and_says_why_it_is_lost(scripts: Scripts) -> None:
    # scenario 77
    gone = [b"the server has no such claim any more"]
    assert scripts.renew(("job", "me", "7")) == gone
    _, _, token = scripts.begin()
    scripts.lapse()
    assert scripts.renew(("job", "me", token)) == [1]
    assert int(scripts.record(JOB)["l"]) > scripts.now() // 1000
    assert scripts.renew(("job", "me", token, TTL * 2)) == [1]
    assert scripts.admin.pttl(JOB) > TTL
    assert scripts.renew(("job", "you", token)) == [b"taken over by host/1/me"]
    scripts.gate("job", int(token) + 1)
    fenced = [b"fenced out by token %d" % (int(token) + 1)]
    assert scripts.renew(("job", "me", token)) == fenced
    scripts.admin.set(JOBFENCE, "x", px=TTL)
    assert scripts.renew(("job", "me", token)) == [b"something else is at its fence"]
    scripts.admin.delete(JOBFENCE)
    scripts.settle("me", token)
    assert scripts.renew(("job", "me", token)) == [b"taken over by an attempt that has ended"]
    scripts.admin.set(JOB, "x", px=TTL)
    assert scripts.renew(("job", "me", token)) == [b"something else is at its key"]


# Jobs


def test_begin_starts_and_writes_down_everything(scripts: Scripts) -> None:
    before = scripts.now()
    begun, attempts, token = scripts.begin(fingerprint="f1", blocks=True)
    assert (begun, attempts) == (b"begun", 1)
    assert before <= int(token) <= scripts.now()
    record = scripts.record(JOB)
    assert 0 <= scripts.now() // 1000 - int(record.pop("a")) < 5_000
    assert 0 < int(record.pop("l")) - scripts.now() // 1000 <= LEASE
    assert record == {
        "s": "p", "t": token.decode(), "o": "me", "n": "1", "b": "host/1/me", "c": "bn1",
        "h": "f1", "u": "1",
    }  # fmt: skip
    assert TTL - 1000 < scripts.admin.pttl(JOB) <= TTL
    assert set(scripts.contents()) == {JOB}


def test_begin_again_by_the_same_attempt_is_the_same_claim(scripts: Scripts) -> None:
    # I7
    claim = scripts.begin()
    scripts.lapse()
    assert scripts.begin() == claim
    assert int(scripts.record(JOB)["l"]) > scripts.now() // 1000
    scripts.lapse()
    claim = scripts.begin("n2")
    assert claim[:2] == [b"reclaimed", 2]
    assert scripts.begin("n2") == claim
    scripts.admin.delete(JOB)
    claim = scripts.begin("n3", lease=0)
    assert scripts.begin("n3", lease=0) == claim
    assert "l" not in scripts.record(JOB)


def test_begin_again_with_its_lock_is_the_same_claim_and_the_same_grant(scripts: Scripts) -> None:
    # I7
    claim = scripts.begin(mode="take")
    scripts.admin.pexpire(LOCK, 100)
    assert scripts.begin(mode="take") == claim
    assert scripts.admin.pttl(LOCK) > LEASE - 1000
    assert scripts.record(LOCK)["token"] == claim[2].decode()


def test_begin_again_touches_no_lock_that_another_has_taken_since(scripts: Scripts) -> None:
    # I2, I7
    scripts.begin(mode="take")
    scripts.admin.delete(LOCK)
    _, token = scripts.acquire("n2", "you", lease=60_000)
    reply = scripts.begin(mode="take")
    assert reply[0] not in (b"begun", b"reclaimed")
    assert scripts.admin.pttl(LOCK) > 50_000
    scripts.lapse()
    assert scripts.begin(mode="take")[0] == b"locked"
    assert scripts.admin.pttl(LOCK) > 50_000
    assert scripts.record(LOCK)["token"] == token.decode()


def test_begin_after_its_attempt_was_taken_back_starts_nothing(scripts: Scripts) -> None:
    # I7, I10
    scripts.unclaim("n1")
    assert scripts.begin("n1") == [b"spent"]
    assert scripts.begin("n2")[:2] == [b"begun", 1]
    assert scripts.unclaim("n2") == 1
    assert scripts.begin("n2") == [b"spent"]
    assert scripts.begin("n3")[:2] == [b"begun", 1]


def test_begin_meets_a_running_job(scripts: Scripts) -> None:
    scripts.begin()
    before = scripts.contents()
    busy, attempts, left, label = scripts.begin("n2", "you")
    assert (busy, attempts, label) == (b"busy", 1, b"host/1/me")
    assert 0 < int(left) <= LEASE
    assert scripts.contents() == before


def test_begin_without_a_lease_is_busy_for_as_long_as_the_record_lives(scripts: Scripts) -> None:
    # scenario 68
    _, _, token = scripts.begin(lease=0)
    busy, _, left, _ = scripts.begin("n2", "you")
    assert busy == b"busy"
    assert LEASE < int(left) <= TTL
    assert scripts.begin("n2", "you", mode="7")[0] == b"busy"
    assert scripts.begin("n2", "you", mode=token)[:2] == [b"reclaimed", 2]


def test_begin_takes_over_while_the_old_starts_lock_is_free(scripts: Scripts) -> None:
    _, token = scripts.acquire("n0", "old")
    scripts.begin("n1", "old", lease=0)
    assert scripts.begin("n2", "new", lease=0, mode="free")[0] == b"busy"
    scripts.release("old", token)
    outcome, attempts, newer = scripts.begin("n2", "new", lease=0, mode="free")
    assert (outcome, attempts) == (b"reclaimed", 2)
    assert not scripts.admin.exists(LOCK)
    assert int(newer) > int(token)


def test_begin_takes_over_when_the_lease_has_run_out(scripts: Scripts) -> None:
    # scenario 67
    _, _, old = scripts.begin(fingerprint="f1")
    scripts.lapse()
    outcome, attempts, token = scripts.begin("n2", "you")
    assert (outcome, attempts) == (b"reclaimed", 2)
    assert int(token) > int(old)
    record = scripts.record(JOB)
    assert (record["o"], record["c"], record["h"]) == ("you", "rn2", "f1")
    assert scripts.settle("me", old)[0] == 0


def test_begin_finds_a_finished_job_with_and_without_its_result(scripts: Scripts) -> None:
    _, _, token = scripts.begin()
    scripts.settle("me", token, "d", b"{}")
    assert scripts.begin("n2") == [b"done", 1, b"{}"]
    scripts.clear()
    _, _, token = scripts.begin()
    scripts.settle("me", token)
    assert scripts.begin("n2") in ([b"done", 1, None], [b"done", 1])


def test_begin_finds_a_failed_job(scripts: Scripts) -> None:
    _, _, token = scripts.begin()
    scripts.settle("me", token, "f", b"why")
    assert scripts.begin("n2") == [b"failed", 1, b"why"]


def test_begin_counts_on_after_a_failed_attempt_that_may_be_retried(scripts: Scripts) -> None:
    _, _, token = scripts.begin(blocks=True)
    scripts.settle("me", token, "x")
    outcome, attempts, newer = scripts.begin("n2")
    assert (outcome, attempts) == (b"begun", 2)
    assert int(newer) > int(token)
    assert "u" not in scripts.record(JOB)


def test_begin_gives_up_after_so_many_starts_and_remembers_that(scripts: Scripts) -> None:
    # scenario 20
    scripts.begin(most=2)
    scripts.lapse()
    assert scripts.begin("n2", most=2)[:2] == [b"reclaimed", 2]
    assert scripts.begin("n3", most=2)[0] == b"busy"
    scripts.lapse()
    failed, attempts, verdict = scripts.begin("n3", most=2)
    assert (failed, attempts) == (b"failed", 2)
    assert json.loads(verdict) == {"type": "abandoned", "holder": "host/1/me"}
    assert scripts.begin("n4") == [b"failed", 2, verdict]
    assert set(scripts.record(JOB)) == {"s", "t", "n", "a", "r"}


def test_begin_asks_a_human_when_an_attempt_that_blocks_has_died(scripts: Scripts) -> None:
    # scenario 70
    scripts.begin(blocks=True)
    assert scripts.begin("n2")[0] == b"busy"
    scripts.lapse()
    assert scripts.begin("n2") == [b"unknown", 1, b"host/1/me"]


def test_begin_refuses_another_fingerprint_whatever_the_state(scripts: Scripts) -> None:
    _, _, token = scripts.begin(fingerprint="f1")
    assert scripts.begin("n2", fingerprint="f2") == [b"conflict", b"f1"]
    assert scripts.begin("n2")[0] == b"busy"
    scripts.settle("me", token, "d", b"{}")
    assert scripts.begin("n2", fingerprint="f2") == [b"conflict", b"f1"]
    assert scripts.begin("n2", fingerprint="f1")[0] == b"done"


def test_begin_with_a_lock_takes_both_or_neither(scripts: Scripts) -> None:
    _, other = scripts.acquire("n0", "you")
    before = scripts.contents()
    locked, attempts, left, label, owner, token = scripts.begin(mode="take")
    assert (locked, attempts, label, owner, token) == (b"locked", 0, b"host/1/you", b"you", other)
    assert 0 < left <= LEASE
    assert scripts.contents() == before
    scripts.release("you", other)
    _, _, token = scripts.begin(mode="take")
    assert int(token) > int(other)
    assert scripts.admin.get(FENCE) == token
    record = scripts.record(LOCK)
    assert (record["owner"], record["token"]) == ("me", token.decode())


def test_begin_takes_a_dead_attempts_own_lock_with_its_claim(scripts: Scripts) -> None:
    _, _, old = scripts.begin(mode="take")
    scripts.lapse()
    outcome, _, token = scripts.begin("n2", "you", mode="take")
    assert outcome == b"reclaimed"
    assert scripts.record(LOCK)["owner"] == "you"
    assert scripts.gate("lock", old)[0] == 0
    scripts.lapse()
    scripts.release("you", token)
    scripts.acquire("n3", "third")
    assert scripts.begin("n4", mode="take")[0] == b"locked"


def test_begin_is_above_every_token_known_for_job_and_lock(scripts: Scripts) -> None:
    # I1
    ahead = scripts.now() + 3_600_000_000
    scripts.gate("job", ahead)
    assert scripts.begin()[2] == b"%d" % (ahead + 1)
    scripts.clear()
    scripts.admin.set(FENCE, ahead + 10, px=TTL)
    assert scripts.begin(mode="take")[2] == b"%d" % (ahead + 11)
    scripts.admin.hset(JOB, "t", ahead + 20)
    scripts.lapse()
    scripts.admin.delete(LOCK)
    assert scripts.begin("n2", mode="take")[2] == b"%d" % (ahead + 21)


def test_settle_remembers_and_wakes_and_may_be_repeated(scripts: Scripts) -> None:
    # I5, I7
    _, _, token = scripts.begin(fingerprint="f1")
    with scripts.admin.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(DONE)
        channel.get_message(timeout=5)
        assert scripts.settle("me", token, "d", b"[1]", ttl=10_000) == [1]
        assert channel.get_message(timeout=5) is not None
    record = scripts.record(JOB)
    assert record.pop("a")
    assert record == {"s": "d", "t": token.decode(), "n": "1", "h": "f1", "r": "[1]"}
    assert 9_000 < scripts.admin.pttl(JOB) <= 10_000
    before = scripts.contents()
    assert scripts.settle("me", token, "d", b"[1]") == [1]
    assert scripts.contents() == before


@pytest.mark.parametrize(("state", "kept"), [("d", None), ("f", b"why"), ("x", None)])
def test_settle_is_accepted_again_in_every_final_state(
    scripts: Scripts, state: str, kept: bytes | None
) -> None:
    # I7
    _, _, token = scripts.begin()
    assert scripts.settle("me", token, state, kept) == [1]
    assert scripts.settle("me", token, state, kept) == [1]
    assert scripts.record(JOB)["s"] == state


def test_settle_is_refused_for_anybody_but_the_owner_who_learns_what_is_there(
    scripts: Scripts,
) -> None:
    # scenario 73, I5
    assert scripts.settle("me", "7") == [0, b"", b"", None, b""]
    _, _, token = scripts.begin()
    for owner, number in (("you", token), ("me", "7"), ("you", "")):
        assert scripts.settle(owner, number) == [0, b"p", token, None, b"host/1/me"]
    scripts.lapse()
    _, _, newer = scripts.begin("n2", "you")
    scripts.settle("you", newer, "d", b"R2")
    assert scripts.settle("me", token, "d", b"R1") == [0, b"d", newer, b"R2", b""]
    assert scripts.record(JOB)["r"] == "R2"
    assert scripts.settle("you", newer, "d", b"R3")[0] == 0


def test_settle_counts_a_late_completion_that_nobody_overtook(scripts: Scripts) -> None:
    # I5
    _, _, token = scripts.begin()
    scripts.lapse()
    assert scripts.settle("me", token, "d", b"late") == [1]


def test_settle_goes_by_the_owner_alone_where_there_is_no_token(scripts: Scripts) -> None:
    scripts.begin(lease=0)
    assert scripts.settle("me", "", "d", b"{}") == [1]
    assert scripts.settle("me", "", "d", b"{}")[0] == 0


def test_settle_frees_its_lock_in_the_same_step_and_no_other(scripts: Scripts) -> None:
    _, _, token = scripts.begin(mode="take")
    with scripts.admin.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(FREE)
        channel.get_message(timeout=5)
        assert scripts.settle("me", token, lock=True) == [1]
        assert channel.get_message(timeout=5) is not None
    assert not scripts.admin.exists(LOCK)
    _, other = scripts.acquire("n2", "you")
    assert scripts.settle("me", token, lock=True) == [1]
    assert scripts.record(LOCK)["token"] == other.decode()


def test_settle_frees_its_lock_also_when_the_completion_is_refused(scripts: Scripts) -> None:
    _, _, token = scripts.begin(mode="take")
    scripts.clear()
    assert scripts.settle("me", token, lock=True)[0] == 0
    assert not scripts.admin.exists(LOCK)


def test_unclaim_takes_back_so_that_the_start_does_not_count(scripts: Scripts) -> None:
    # I10
    _, _, token = scripts.begin(mode="take", blocks=True)
    assert scripts.unclaim("n2", lock=True) == 0
    assert scripts.record(JOB)["s"] == "p"
    assert scripts.unclaim("n1", lock=True) == 1
    assert not scripts.admin.exists(LOCK)
    record = scripts.record(JOB)
    assert (record["s"], record["n"], record["t"]) == ("x", "0", token.decode())
    assert 0 < scripts.admin.pttl(JOB) <= 30_000
    assert scripts.unclaim("n1", lock=True) == 0
    assert scripts.begin("n2")[:2] == [b"begun", 1]


def test_unclaim_of_a_takeover_leaves_the_attempts_before_it(scripts: Scripts) -> None:
    # I10
    scripts.begin()
    scripts.lapse()
    scripts.begin("n2")
    assert scripts.unclaim("n2") == 1
    assert scripts.record(JOB)["n"] == "1"
    assert scripts.admin.pttl(JOB) > 30_000
    assert scripts.begin("n3")[:2] == [b"begun", 2]


def test_unclaim_leaves_locks_and_jobs_of_others_alone(scripts: Scripts) -> None:
    scripts.acquire("n8", "you")
    _, _, token = scripts.begin("n9", "you")
    before = scripts.contents()
    assert scripts.unclaim("n1", lock=True) == 0
    assert scripts.contents() == before
    scripts.settle("you", token, "d", b"{}")
    before = scripts.contents()
    assert scripts.unclaim("n1", lock=True) == 0
    assert scripts.contents() == before


def test_job_reads_every_state_and_changes_nothing(scripts: Scripts) -> None:
    assert scripts.job() == []
    _, _, token = scripts.begin(fingerprint="f1")
    before = scripts.contents()
    *facts, left, label, fingerprint = scripts.job()
    assert facts == [b"p", 1, token, None]
    assert 0 < int(left) <= LEASE
    assert (label, fingerprint) == (b"host/1/me", b"f1")
    assert scripts.contents() == before
    scripts.lapse()
    assert int(scripts.job()[4]) < 0
    scripts.settle("me", token, "d", b"{}")
    assert scripts.job() == [b"d", 1, token, b"{}", b"", b"", b"f1"]
    scripts.clear()
    scripts.begin(lease=0)
    assert scripts.job()[4:] == [b"", b"host/1/me", b""]


def test_clear_forgets_and_wakes(scripts: Scripts) -> None:
    assert scripts.clear() == 0
    scripts.begin()
    with scripts.admin.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(DONE)
        channel.get_message(timeout=5)
        assert scripts.clear() == 1
        assert channel.get_message(timeout=5) is not None
    assert scripts.job() == []


def test_clear_resolves_only_an_unknown_outcome(scripts: Scripts) -> None:
    # scenario 70
    assert scripts.clear("resolve", b"{}") == 0
    scripts.begin()
    scripts.lapse()
    assert scripts.clear("resolve", b"{}") == 0
    scripts.clear()
    scripts.begin(blocks=True)
    assert scripts.clear("resolve", b"{}") == 0
    scripts.lapse()
    assert scripts.clear("resolve", b"{}", ttl=10_000) == 1
    assert 9_000 < scripts.admin.pttl(JOB) <= 10_000
    assert scripts.begin("n2") == [b"done", 1, b"{}"]
    assert scripts.clear("resolve", b"{}") == 0
    assert set(scripts.record(JOB)) == {"s", "t", "n", "a", "r"}


# The gate


def test_gate_refuses_an_older_token_and_touches_nothing(scripts: Scripts) -> None:
    # I4
    scripts.gate("lock", 42)
    before = scripts.contents()
    assert scripts.gate("lock", 41, (b"SET", b"k", b"v")) == [0, b"42"]
    assert scripts.contents() == before


def test_gate_runs_commands_in_order_and_passes_their_errors_on(scripts: Scripts) -> None:
    reply = scripts.gate(
        "lock", 42, (b"SET", b"k", b"v"), (b"INCR", b"k"), (b"GET", b"k"), (b"GET", b"none")
    )
    assert reply[:3] == [1, b"42", b"OK"]
    assert isinstance(reply[3], ResponseError)
    assert reply[4:] == [b"v", None]
    assert scripts.admin.get(FENCE) == b"42"


def test_gate_again_by_the_same_attempt_runs_nothing_also_after_a_newer_grant(
    scripts: Scripts,
) -> None:
    # I7
    commands = [(b"INCR", b"n"), (b"LPOP", b"none"), (b"APPEND", b"l", b"x"), (b"GET", b"n")]
    scripts.admin.rpush("l", "x")
    reply = scripts.gate("lock", 42, *commands, op=OP)
    assert [reply[:4], reply[5]] == [[1, b"42", 1, None], b"1"]
    assert isinstance(reply[4], ResponseError)
    _, token = scripts.acquire()
    again = scripts.gate("lock", 42, *commands, op=OP)
    assert again[:2] == [1, token]
    assert list(map(str, again[2:])) == list(map(str, reply[2:]))
    assert scripts.admin.get("n") == b"1"
    assert scripts.gate("lock", 42, *commands) == [0, token]
    assert scripts.gate("lock", token, *commands)[2] == 2


def test_gate_without_commands_remembers_nothing(scripts: Scripts) -> None:
    assert scripts.gate("lock", 42, remember=0) == [1, b"42"]
    assert set(scripts.contents()) == {FENCE}


def test_gate_compares_a_job_token_with_the_record_and_the_fence(scripts: Scripts) -> None:
    _, _, token = scripts.begin()
    assert scripts.gate("job", int(token) - 1) == [0, token]
    assert not scripts.admin.exists(JOBFENCE)
    assert scripts.gate("job", token) == [1, token]
    assert scripts.admin.get(JOBFENCE) == token
    scripts.clear()
    assert scripts.gate("job", int(token) - 1) == [0, token]
    assert not scripts.admin.exists(FENCE)


def test_fence_is_the_larger_of_record_and_fence_for_a_job(scripts: Scripts) -> None:
    assert (scripts.fence(), scripts.fence("job")) == (b"0", b"0")
    assert scripts.contents() == {}
    scripts.gate("lock", 42)
    assert (scripts.fence(), scripts.fence("job")) == (b"42", b"0")
    _, _, token = scripts.begin()
    assert scripts.fence("job") == token
    scripts.gate("job", int(token) + 1)
    assert scripts.fence("job") == b"%d" % (int(token) + 1)


# Foreign values


FOREIGN = [
    ("acquire", [LOCK, FENCE]),
    ("release", [LOCK]),
    ("break_", [LOCK, FENCE]),
    ("inspect", [LOCK, FENCE]),
    ("begin", [JOB, JOBFENCE]),
    ("take", [JOB, JOBFENCE, LOCK, FENCE]),
    ("settle", [JOB, LOCK]),
    ("unclaim", [JOB, LOCK]),
    ("job", [JOB]),
    ("clear", [JOB]),
    ("gate", [FENCE]),
    ("gate_job", [JOBFENCE, None, JOB]),
    ("fence", [FENCE]),
    ("fence_job", [JOBFENCE, JOB]),
]


@pytest.mark.parametrize(
    ("verb", "number", "key"),
    [
        pytest.param(verb, number, key, id=f"{verb}-{number}")
        for verb, keys in FOREIGN
        for number, key in enumerate(keys, 1)
        if key is not None
    ],
)
@pytest.mark.parametrize("value", ["list", "text", "hash"])
def test_something_else_at_a_key_is_named_by_its_number_and_stays(
    scripts: Scripts, verb: str, number: int, key: bytes, value: str
) -> None:
    # I12
    def run() -> Any:
        how = {
            "release": lambda: scripts.release("me", "7"),
            "take": lambda: scripts.begin(mode="take"),
            "settle": lambda: scripts.settle("me", "7", lock=True),
            "unclaim": lambda: scripts.unclaim("n1", lock=True),
            "gate": lambda: scripts.gate("lock", 7, (b"SET", b"k", b"v")),
            "gate_job": lambda: scripts.gate("job", 7, (b"SET", b"k", b"v")),
            "fence_job": lambda: scripts.fence("job"),
        }
        return how[verb]() if verb in how else getattr(scripts, verb)()

    if value == "list":
        scripts.admin.rpush(key, "x")
    elif value == "hash":
        scripts.admin.hset(key, "colour", "red")
    else:
        scripts.admin.set(key, "colour")
    before = scripts.contents()
    if value == "hash" and key == JOB and verb in ("gate_job", "fence_job", "unclaim"):
        run()  # they only look for a token or a nonce in it, and there is none
    else:
        with pytest.raises(ResponseError, match=f"^FOREIGN {number}$"):
            run()
        assert scripts.contents() == before
    assert scripts.admin.dump(key) == before[key]


# A small reference, and any order of steps


class Reference(RuleBasedStateMachine):
    """Locks, claims and gated writes in any order, beside the few lines that say what they mean."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.scripts = Scripts(self.server, watched=False)
        self.nonces = itertools.count()
        self.issued: dict[str, list[int]] = {"lock": [], "job": []}
        self.holder: dict[str, tuple[str, int] | None] = {"lock": None, "job": None}
        self.leases: list[tuple[str, str, int]] = []
        self.job: tuple[str, int, bytes | None] | None = None
        self.counter = 0

    def teardown(self) -> None:
        self.scripts.close()

    def nonce(self) -> str:
        return f"{next(self.nonces):x}"

    def newest(self, kind: str) -> int:
        return max(self.issued[kind], default=0)

    def granted(self, kind: str, owner: str, token: bytes) -> None:
        assert int(token) > self.newest(kind)  # I1
        self.issued[kind].append(int(token))
        self.holder[kind] = (owner, int(token))
        self.leases.append((kind, owner, int(token)))

    @rule(owner=st.sampled_from("xyz"))
    def acquire(self, owner: str) -> None:
        nonce = self.nonce()
        reply = self.scripts.acquire(nonce, owner)
        assert (reply[0] == 1) == (self.holder["lock"] is None)  # I2
        if reply[0] == 1:
            assert self.scripts.acquire(nonce, owner) == reply  # I7
            self.granted("lock", owner, reply[1])
        else:
            assert (reply[2].decode(), int(reply[3])) == self.holder["lock"]

    @rule(owner=st.sampled_from("xyz"))
    def begin(self, owner: str) -> None:
        nonce = self.nonce()
        reply = self.scripts.begin(nonce, owner)
        if self.job is not None and self.job[0] == "d":
            assert reply == [b"done", *self.job[1:]]
            return
        attempts = 0 if self.job is None else self.job[1]
        if self.holder["job"] is not None:
            assert reply[:2] == [b"busy", attempts]
            return
        reclaimed = self.job is not None and self.job[0] == "p"
        assert reply[:2] == [b"reclaimed" if reclaimed else b"begun", attempts + 1]
        assert self.scripts.begin(nonce, owner) == reply  # I7
        self.granted("job", owner, reply[2])
        self.job = ("p", attempts + 1, None)

    @rule(kind=st.sampled_from(["lock", "job"]))
    def expire(self, kind: str) -> None:
        if kind == "lock":
            self.scripts.admin.delete(LOCK)
        elif self.holder["job"] is not None:
            self.scripts.lapse()
        self.holder[kind] = None

    @rule()
    def break_lock(self) -> None:
        raised = int(self.scripts.break_()[0])
        assert raised > self.newest("lock")
        self.issued["lock"].append(raised)
        self.holder["lock"] = None

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        kind, owner, token = data.draw(st.sampled_from(self.leases))
        (answer,) = self.scripts.renew((kind, owner, token))
        if kind == "lock":
            mine = self.holder["lock"] == (owner, token) and token == self.newest("lock")
        else:  # a claim whose lease ran out may be renewed while nobody overtook it
            mine = token == self.newest("job") and self.job is not None and self.job[0] == "p"
        assert (answer == 1) == mine
        if mine:
            self.holder[kind] = (owner, token)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        kind, owner, token = data.draw(st.sampled_from(self.leases))
        if kind == "lock":
            mine = self.holder["lock"] == (owner, token)
            assert (self.scripts.release(owner, token) == 1) == mine
            if mine:
                self.holder["lock"] = None

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), state=st.sampled_from("dx"))
    def settle(self, data: st.DataObject, state: str) -> None:
        kind, owner, token = data.draw(st.sampled_from(self.leases))
        if kind == "lock":
            return
        kept = b"%d" % token if state == "d" else None
        reply = self.scripts.settle(owner, token, state, kept)
        current = token == self.newest("job") and self.job is not None
        mine = current and self.job is not None and self.job[0] in ("p", state)
        assert (reply[0] == 1) == mine  # I5
        if mine and self.job is not None and self.job[0] == "p":
            self.job = (state, self.job[1], kept)
            self.holder["job"] = None

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        kind, _, token = data.draw(st.sampled_from(self.leases))
        op = KEYS.once("a", self.nonce())
        reply = self.scripts.gate(kind, token, (b"INCR", b"n"), op=op)
        assert (reply[0] == 1) == (token >= self.newest(kind))  # I3
        if reply[0] == 1:
            self.counter += 1
            assert reply[2] == self.counter
            assert self.scripts.gate(kind, token, (b"INCR", b"n"), op=op) == reply  # I7

    @invariant()
    def the_server_agrees(self) -> None:
        assert int(self.scripts.fence("lock")) == self.newest("lock")
        assert int(self.scripts.fence("job")) == self.newest("job")
        assert int(self.scripts.admin.get("n") or 0) == self.counter  # I4
        record = self.scripts.record(LOCK)
        held = self.holder["lock"]
        assert record.get("owner") == (None if held is None else held[0])
        assert (self.scripts.job() or [b""])[0].decode() == (self.job[0] if self.job else "")


def test_any_order_of_steps_does_what_the_reference_says(server: RedisServer) -> None:
    # I1, I2, I3, I4, I5, I7
    class Machine(Reference):
        pass

    Machine.server = server
    case = Machine.TestCase
    case.settings = settings(
        max_examples=20,
        stateful_step_count=25,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()


def test_a_script_is_loaded_with_the_prelude_and_named_by_its_digest(scripts: Scripts) -> None:
    redis: Redis = scripts.admin
    prelude = FILES["_prelude"].read_text("utf-8")
    for name, script in SCRIPTS.items():
        assert script.source == f"{prelude}\n{FILES[name].read_text('utf-8')}"
        assert redis.script_exists(script.digest) == [True]
