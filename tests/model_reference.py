"""What lock, guard and gate promise, as plain Python on dictionaries, to hold against a server.

Rules this module obeys:

* It asks nobody: it hears what a step answered and judges that, then notes what must be true now.
* It is written from the promises, not from the scripts. Where DESIGN.md numbers a promise, breaking
  it raises `Violation` with that number.
* Times are windows: a step happened between two readings of the server's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RETENTION = 7 * 86400.0
TOLERANCE = 1000.0
"""Milliseconds by which an expiry may differ: far less than any two lives differ here."""

Answer = tuple[Any, ...]
Place = tuple[str, str]
"""Kind and name of a record, as ("lock", "a")."""

KINDS = ("lock", "fence", "job", "jobfence")
OWN = {"lock": "I2", "fence": "I3", "job": "I5", "jobfence": "I3", "data": "I4"}
"""Which promise is broken when a record is not what it has to be."""
STATUS = {"p": "pending", "d": "done", "f": "failed", "x": None, "": None}


class Violation(AssertionError):
    """A promise was not kept."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


def require(condition: object, invariant: str, text: str) -> None:
    if not condition:
        raise Violation(invariant, text)


def agree(answer: object, promised: object, invariant: str) -> None:
    require(answer == promised, invariant, f"it answered {answer!r}, promised is {promised!r}")


def key_of(place: Place) -> bytes:
    """The key of a record: written out here, so that a slip in the package is seen (I11)."""
    kind, name = place
    tag = "".join(f"%{ord(c):02X}" if c in "%{} " else c for c in name)
    return f"fencekit:{{{tag}}}:{kind}".encode()


@dataclass(frozen=True)
class Due:
    """When a key expires: between these two, in milliseconds of the server's clock."""

    earliest: float
    latest: float

    def or_later(self, other: Due) -> Due:
        """An expiry is lengthened, never shortened."""
        return Due(max(self.earliest, other.earliest), max(self.latest, other.latest))

    def fits(self, moment: float) -> bool:
        return self.earliest - TOLERANCE <= moment <= self.latest + TOLERANCE


@dataclass(frozen=True)
class Window:
    """A step happened between these two, in microseconds of the server's clock."""

    earliest: int
    latest: int

    def after(self, seconds: float) -> Due:
        return Due(
            self.earliest / 1000 + seconds * 1000,
            self.latest / 1000 + seconds * 1000,
        )


@dataclass
class Foreign:
    """Something at a key of fencekit's that fencekit did not write."""

    type: str
    value: Any
    due: None = None


@dataclass
class Held:
    owner: str
    token: int
    nonce: bytes
    due: Due
    delayed: bool = False
    over: bool = False
    """The lease has ended; the lock delay keeps the name back."""


@dataclass
class Tombstone:
    due: Due
    nonce: bytes | None = None
    evicted: int | None = None
    reason: str = ""


@dataclass
class Fence:
    token: int
    due: Due


@dataclass
class Job:
    state: str
    token: int
    attempts: int
    due: Due
    owner: str = ""
    cookie: bytes | None = None
    lease: Due | None = None
    lapsed: bool = False
    fingerprint: str = ""
    kept: bytes | None = None
    blocks: bool = False
    completions: int = 0

    def end(self, state: str) -> None:
        """What a job keeps that nobody runs any more."""
        self.state, self.owner, self.cookie = state, "", None
        self.lease, self.lapsed, self.blocks = None, False, False


@dataclass
class Data:
    """A key of the application's own."""

    value: bytes
    due: Due | None = None


@dataclass(frozen=True)
class Start:
    """What a start of a job asks for."""

    name: str
    owner: str
    ttl: float
    lease: float | None = None
    lock: str | None = None
    takes: bool = True
    """Whether it takes its lock, or only asks whether that is free."""
    fingerprint: str = ""
    most: int = 0
    blocks: bool = False


@dataclass(frozen=True)
class Token:
    """What a write presents."""

    name: str
    kind: str
    value: int

    @property
    def place(self) -> Place:
        return ("fence" if self.kind == "lock" else "jobfence", self.name)


@dataclass
class Reference:
    """All records as they have to be."""

    records: dict[Place, Any] = field(default_factory=dict)
    data: dict[bytes, Data] = field(default_factory=dict)
    writes: dict[bytes, list[Any]] = field(default_factory=dict)
    """Replies of gated writes by the key under which they are remembered."""
    issued: dict[Place, int] = field(default_factory=dict)
    """The largest token ever granted or accepted; survives whatever happens to the server."""
    forgotten: set[Place] = field(default_factory=set)
    """Where the server has lost what it knew of tokens."""

    # What is there

    def foreign(self, *places: Place) -> Answer | None:
        """The answer for the first of these records that is foreign."""
        for place in places:
            if isinstance(self.records.get(place), Foreign):
                return ("foreign", key_of(place))
        return None

    def held(self, name: str) -> Held | None:
        lock = self.records.get(("lock", name))
        return lock if isinstance(lock, Held) else None

    def job(self, name: str) -> Job | None:
        job = self.records.get(("job", name))
        return job if isinstance(job, Job) else None

    def fence(self, place: Place) -> int:
        fence = self.records.get(place)
        return fence.token if isinstance(fence, Fence) else 0

    def newest(self, token: Token) -> int:
        """The newest token known where this one is presented."""
        newest = self.fence(token.place)
        job = self.job(token.name)
        return max(newest, job.token) if token.kind == "job" and job else newest

    # What happens to the server

    def lose(self, place: Place) -> None:
        """A record is gone: expired, evicted, or somebody deleted it."""
        if self.records.pop(place, None) is not None:
            kind, name = place
            if kind != "lock":
                self.forgotten.add(("lock" if kind == "fence" else "job", name))

    def flush(self) -> None:
        for place in list(self.records):
            self.lose(place)
        self.data.clear()
        self.writes.clear()

    def clock_was_ahead(self, place: Place, value: int, due: Due) -> None:
        """A token was accepted while the server's clock was ahead; it has stepped back since."""
        self.records[place] = Fence(value, due)
        self._note(("lock" if place[0] == "fence" else "job", place[1]), value)

    def _note(self, subject: Place, token: int) -> None:
        self.issued[subject] = max(token, self.issued.get(subject, 0))

    def _grown(self, subject: Place, token: int, known: int, window: Window) -> None:
        """I1 for a new token, where the server knows one already (0: none)."""
        before = self.issued.get(subject, 0)
        # Nothing is promised where a clock went back *and* the records were lost.
        void = subject in self.forgotten and before >= window.earliest
        require(
            token > before or void, "I1", f"token {token} of {subject} is not larger than {before}"
        )
        least, most = max(known + 1, window.earliest), max(known + 1, window.latest)
        require(least <= token <= most, "I1", f"token {token} of {subject}: not in {least}..{most}")
        self.issued[subject] = token
        self.forgotten.discard(subject)

    # Locks

    def acquire(
        self, name: str, owner: str, nonce: bytes, ttl: float, delay: float, answer: Answer,
        window: Window,
    ) -> None:  # fmt: skip
        lock = self.records.get(("lock", name))
        bad = self.foreign(("lock", name), ("fence", name))
        if bad:
            agree(answer, bad, "I12")
        elif isinstance(lock, Held) and lock.nonce == nonce:
            agree(answer, ("granted", lock.token), "I7")
            lock.due, lock.over = lock.due.or_later(window.after(ttl + delay)), False
        elif isinstance(lock, Held):
            agree(answer, ("busy", lock.owner), "I2")
        elif isinstance(lock, Tombstone) and lock.nonce == nonce:
            agree(answer, ("spent",), "I10")
        else:
            agree(answer[0], "granted", "I2")
            token = answer[1]
            self._grown(("lock", name), token, self.fence(("fence", name)), window)
            self._grant(name, Held(owner, token, nonce, window.after(ttl + delay), delay > 0))
            self.records["fence", name] = Fence(token, window.after(RETENTION))

    def _grant(self, name: str, lock: Held) -> None:
        self.records["lock", name] = lock

    def release(self, name: str, owner: str, token: int, answer: Answer, window: Window) -> None:
        del window
        lock = self.held(name)
        bad = self.foreign(("lock", name))
        if bad:
            agree(answer, bad, "I12")
        elif lock and (lock.owner, lock.token) == (owner, token):
            agree(answer, ("released",), "I2")
            del self.records["lock", name]
        else:
            agree(answer, ("gone",), "I2")

    def give_up(
        self, name: str, nonce: bytes, spent: float, answer: Answer, window: Window
    ) -> None:
        """An attempt whose answer nobody saw is taken back, and whatever of it comes late."""
        place = ("lock", name)
        lock = self.records.get(place)
        bad = self.foreign(place)
        if bad:
            agree(answer, bad, "I12")
        elif isinstance(lock, Held) and lock.nonce != nonce:
            agree(answer, ("gone",), "I10")
        elif isinstance(lock, Held):
            agree(answer, ("released",), "I10")
            self.records[place] = Tombstone(window.after(spent), nonce)
        else:
            agree(answer, ("gone",), "I10")
            stone = lock or Tombstone(window.after(spent))
            stone.nonce, stone.due = nonce, stone.due.or_later(window.after(spent))
            self.records[place] = stone

    def renew_lock(
        self, name: str, owner: str, token: int, ttl: float, delay: float, window: Window, *,
        exactly: bool = False,
    ) -> bool:  # fmt: skip
        """Whether a lease is renewed: only while it is its owner's and nobody has fenced it out.

        Only an extension brings its end forward, `exactly` as it says.
        """
        lock, fence = self.held(name), self.fence(("fence", name))
        if (
            lock is None
            or (lock.owner, lock.token) != (owner, token)
            or lock.over
            or self.foreign(("fence", name))
            or fence > token
        ):
            return False
        due = window.after(ttl + delay)
        lock.due = due if exactly else lock.due.or_later(due)
        kept = self.records.get(("fence", name))
        due = window.after(RETENTION)
        self.records["fence", name] = Fence(token, kept.due.or_later(due) if kept else due)
        return True

    def extend(
        self, name: str, owner: str, token: int, ttl: float, delay: float, answer: Answer,
        window: Window,
    ) -> None:  # fmt: skip
        renewed = self.renew_lock(name, owner, token, ttl, delay, window, exactly=True)
        agree(answer, ("renewed",) if renewed else ("lost",), "I2")

    def break_lock(self, name: str, reason: str, answer: Answer, window: Window) -> None:
        lock = self.held(name)
        bad = self.foreign(("lock", name), ("fence", name))
        if bad:
            agree(answer, bad, "I12")
            return
        agree(answer[0], "broken", "I3")
        agree(answer[2], lock.token if lock else 0, "I2")
        self._grown(("lock", name), answer[1], self.fence(("fence", name)), window)
        due = window.after(RETENTION)
        self.records["fence", name] = Fence(answer[1], due)
        if lock:
            self.records["lock", name] = Tombstone(due, evicted=lock.token, reason=reason)

    # Jobs

    def begin(self, start: Start, nonce: bytes, answer: Answer, window: Window) -> None:
        name, lock_name = start.name, start.lock
        takes = lock_name is not None and start.takes
        lock = None if lock_name is None else self.held(lock_name)
        places = [("job", name), ("jobfence", name)]
        if lock_name is not None:
            places.append(("lock", lock_name))
        if takes:
            places.append(("fence", lock_name or ""))
        bad = self.foreign(*places)
        if bad:
            agree(answer, bad, "I12")
            return
        job = self.job(name)
        outcome = "begun"
        if job:
            verdict, invariant = self._known(job, start, nonce, lock)
            if verdict and verdict[0] == "again":
                agree(answer, verdict[1:], invariant)
                self._begun_again(job, start, lock if takes else None, window)
                return
            if verdict and verdict[0] != "reclaimed":
                agree(answer, verdict, invariant)
                return
            outcome = verdict[0] if verdict else outcome
            if start.most and job.attempts >= start.most:
                agree(answer, ("failed", job.attempts, "abandoned"), "I5")
                job.end("f")
                job.kept = b'{"type": "abandoned"}'
                job.due = job.due.or_later(window.after(start.ttl))
                return
        if takes and lock and not (outcome == "reclaimed" and job and lock.token == job.token):
            agree(answer, ("locked", lock.owner), "I2")
            return
        attempts = job.attempts + 1 if job else 1
        agree(answer[:2], (outcome, attempts), "I5")
        token = answer[2]
        known = max(job.token if job else 0, self.fence(("jobfence", name)))
        if takes:
            assert lock_name is not None
            assert start.lease is not None
            known = max(known, self.fence(("fence", lock_name)))
            self._grown(("lock", lock_name), token, known, window)
            self._grant(lock_name, Held(start.owner, token, nonce, window.after(start.lease)))
            self.records["fence", lock_name] = Fence(token, window.after(RETENTION))
        self._grown(("job", name), token, known, window)
        lease = None if start.lease is None else window.after(start.lease)
        self.records["job", name] = Job(
            "p", token, attempts, window.after(max(start.ttl, start.lease or 0)), start.owner,
            outcome[:1].encode() + nonce, lease, False,
            start.fingerprint or (job.fingerprint if job else ""), None, start.blocks,
        )  # fmt: skip

    def _known(
        self, job: Job, start: Start, nonce: bytes, lock: Held | None
    ) -> tuple[Answer | None, str]:
        """What a known job answers: its end, "again", a refusal, "reclaimed", or None to begin."""
        if start.fingerprint and job.fingerprint and start.fingerprint != job.fingerprint:
            return ("conflict", job.fingerprint), "I5"
        if job.state == "d":
            return ("done", job.attempts, job.kept), "I6"
        if job.state == "f":
            return ("failed", job.attempts, json.loads(job.kept or b"{}").get("type", "")), "I6"
        # The same attempt is still under way, if what it took is still its own.
        mine = job.cookie is not None and job.cookie[1:] == nonce
        taken = start.lock is not None and start.takes
        if mine and job.state == "x":
            return ("spent",), "I10"
        if mine and (not taken or (lock is not None and lock.nonce == nonce)):
            outcome = "reclaimed" if job.cookie and job.cookie[:1] == b"r" else "begun"
            return ("again", outcome, job.attempts, job.token), "I7"
        if job.state == "x":
            return None, ""
        takable = (
            job.lapsed
            if job.lease is not None
            else start.lock is not None and not start.takes and lock is None
        )
        if not takable:
            return ("busy", job.attempts), "I5"
        if job.blocks:
            return ("unknown", job.attempts), "I5"
        return ("reclaimed",), ""

    def _begun_again(self, job: Job, start: Start, lock: Held | None, window: Window) -> None:
        if start.lease is not None:
            job.lease, job.lapsed = window.after(start.lease), False
            job.due = job.due.or_later(job.lease)
            if lock:
                lock.due = window.after(start.lease)

    def settle(
        self, name: str, owner: str, token: int | None, state: str, kept: bytes | None,
        ttl: float | None, lock_name: str | None, answer: Answer, window: Window,
    ) -> None:  # fmt: skip
        places = [("job", name)] + ([] if lock_name is None else [("lock", lock_name)])
        bad = self.foreign(*places)
        if bad:
            agree(answer, bad, "I12")
            return
        job = self.job(name)
        lock = None if lock_name is None else self.held(lock_name)
        if lock_name and lock and (lock.owner, lock.token) == (owner, token):
            del self.records["lock", lock_name]
        mine = job and job.state == "p" and job.owner == owner and token in (None, job.token)
        again = job and token == job.token and (job.state, job.kept) == (state, kept)
        if not job or not (mine or again):
            memo = job.kept if job and job.state == "d" else None
            agree(answer, ("refused", STATUS[job.state if job else ""], memo), "I5")
            return
        agree(answer, ("settled",), "I5" if mine else "I7")
        if mine:
            job.completions += state == "d"
            require(job.completions <= 1, "I5", f"{name!r} was completed {job.completions} times")
            job.end(state)
            job.kept = kept
            if ttl is not None:
                job.due = window.after(ttl)

    def unclaim(
        self, start: Start, nonce: bytes, spent: float, answer: Answer, window: Window
    ) -> None:
        takes = start.lock is not None and start.takes
        place = ("job", start.name)
        found = self.records.get(place)
        wrong = isinstance(found, Foreign) and found.type != "hash"
        bad = self.foreign(place) if wrong else None
        bad = bad or (self.foreign(("lock", start.lock or "")) if takes else None)
        if bad:
            agree(answer, bad, "I12")
            return
        lock = self.held(start.lock or "") if takes else None
        if lock and lock.nonce == nonce:
            del self.records["lock", start.lock or ""]
        job = self.job(start.name)
        if job and job.state == "p" and job.cookie and job.cookie[1:] == nonce:
            agree(answer, ("flag", True), "I10")
            job.end("x")
            job.attempts, job.cookie = job.attempts - 1, b"x" + nonce
            if job.attempts == 0:  # it was the first: nothing was ever started
                job.due, job.fingerprint = window.after(spent), ""
            return
        agree(answer, ("flag", False), "I10")
        if found is None:
            self.records[place] = Job("x", 1, 0, window.after(spent), cookie=b"x" + nonce)

    def renew_job(self, name: str, owner: str, token: int, lease: float, window: Window) -> bool:
        job = self.job(name)
        if (
            job is None
            or (job.state, job.owner, job.token) != ("p", owner, token)
            or self.foreign(("jobfence", name))
            or self.fence(("jobfence", name)) > token
        ):
            return False
        job.lease, job.lapsed = window.after(lease), False
        job.due = job.due.or_later(job.lease)
        return True

    def clear(self, name: str, answer: Answer, window: Window) -> None:
        del window
        bad = self.foreign(("job", name))
        agree(answer, bad or ("flag", self.job(name) is not None), "I12" if bad else "I5")
        if not bad:
            self.lose(("job", name))

    def resolve(
        self, name: str, kept: bytes | None, ttl: float | None, answer: Answer, window: Window
    ) -> None:
        bad = self.foreign(("job", name))
        job = self.job(name)
        unknown = job is not None and job.state == "p" and job.blocks and job.lapsed
        agree(answer, bad or ("flag", unknown), "I12" if bad else "I5")
        if job and unknown:
            job.completions += 1
            require(job.completions <= 1, "I5", f"{name!r} was completed {job.completions} times")
            job.end("d")
            job.kept = kept
            if ttl is not None:
                job.due = window.after(ttl)

    # Gates

    def unreadable(self, token: Token) -> Answer | None:
        """The answer where a token's fence, or its job's, cannot be read."""
        bad = self.foreign(token.place)
        job = self.records.get(("job", token.name))
        if token.kind == "job" and isinstance(job, Foreign) and job.type != "hash":
            bad = bad or self.foreign(("job", token.name))
        return bad

    def write(
        self, token: Token, memory: bytes, remembered: bool, commands: Sequence[Sequence[bytes]],
        answer: Answer, window: Window,
    ) -> None:  # fmt: skip
        bad = self.unreadable(token)
        newest = self.newest(token)
        if bad:
            agree(answer, bad, "I12")
        elif remembered and memory in self.writes:
            agree(answer, ("written", self.writes[memory]), "I7")
        elif token.value < newest:
            agree(answer, ("stale", newest), "I3")
        else:
            replies = [self._command(words, window) for words in commands]
            agree(answer, ("written", replies), "I4")
            self._note((token.kind, token.name), token.value)
            kept, due = self.records.get(token.place), window.after(RETENTION)
            if kept and kept.token == token.value:
                due = kept.due.or_later(due)
            self.records[token.place] = Fence(token.value, due)
            if remembered:
                self.writes[memory] = replies

    def _command(self, words: Sequence[bytes], window: Window) -> Any:
        name, key, *rest = words
        if name == b"SET":
            due = window.after(int(rest[2]) / 1000) if len(rest) > 1 else None
            self.data[key] = Data(rest[0], due)
            return b"OK"
        assert name == b"INCR"
        found = self.data.setdefault(key, Data(b"0"))
        if not found.value.isdigit():
            return "error"
        found.value = b"%d" % (int(found.value) + 1)
        return int(found.value)

    # The whole server

    def compare(self, seen: Mapping[bytes, tuple[str, Any, float | None]]) -> None:
        """All keys, values and expiries on the server are those that have to be there."""
        wanted = {key_of(place): (place[0], record) for place, record in self.records.items()}
        wanted.update({key: ("data", record) for key, record in self.data.items()})
        for key, (type_, value, due) in seen.items():
            if key in self.writes:
                require(due is not None, "I8", f"{key!r} has no expiry")
                continue
            promise = "I11" if key.startswith(b"fencekit:") else "I4"
            require(key in wanted, promise, f"nothing should be at {key!r}, there is {value!r}")
            _, record = wanted[key]
            if isinstance(record, Foreign):
                untouched = (type_, value) == (record.type, record.value)
                require(untouched, "I12", f"{key!r}: {record.value!r} became {value!r}")
                continue
            problem = _differs(record, value)
            require(not problem, problem or "", f"{key!r} is {value!r}, has to be {record!r}")
            if record.due is None:
                require(due is None, "I4", f"{key!r} should not expire")
                continue
            promise = "I4" if isinstance(record, Data) else "I8"
            require(due is not None, promise, f"{key!r} has no expiry")
            fits = due is not None and record.due.fits(due)
            require(fits, promise, f"{key!r} expires at {due}, which is not within {record.due}")
        for key in wanted.keys() - seen.keys():
            kind, record = wanted[key]
            promise = "I10" if isinstance(record, Tombstone) else OWN[kind]
            raise Violation(promise, f"{key!r} is gone, has to be {record!r}")


def _differs(record: Any, value: Any) -> str:
    """The promise that a stored value breaks, or nothing."""
    if isinstance(record, Data):
        return "" if value == record.value else "I4"
    if isinstance(record, Fence):
        return "" if value == b"%d" % record.token else "I3"
    if not isinstance(value, dict):
        return "I12"
    if isinstance(record, Job):
        return _job_differs(record, value)
    if isinstance(record, Held):
        names = {b"owner", b"token", b"since", b"by", b"nonce"}
        fine = (
            value.keys() == names | ({b"until"} if record.delayed else set())
            and value[b"owner"] == record.owner.encode()
            and value[b"token"] == b"%d" % record.token
            and value[b"nonce"] == record.nonce
        )
        return "" if fine else "I2"
    stone: dict[bytes, bytes] = {}
    if record.nonce is not None:
        stone[b"nonce"] = record.nonce
    if record.evicted is not None:
        stone.update({b"evicted": b"%d" % record.evicted, b"reason": record.reason.encode()})
    return "" if value == stone else "I10"


def _job_differs(job: Job, value: dict[bytes, bytes]) -> str:
    wanted = {b"s": job.state.encode(), b"t": b"%d" % job.token, b"n": b"%d" % job.attempts}
    free: set[bytes] = {b"a"}
    if job.state == "p":
        wanted[b"o"] = job.owner.encode()
        free.add(b"b")
    free.update(_optional(job, wanted))
    if value.keys() - free != wanted.keys() or free - value.keys() - {b"a"}:
        return "I5"
    if any(value[name] != wanted[name] for name in wanted if name != b"r"):
        return "I5"
    if job.state == "f" and job.kept is not None:
        same = json.loads(value[b"r"]).get("type") == json.loads(job.kept).get("type")
        return "" if same else "I6"
    if value.get(b"r") != job.kept:
        return "I6"
    if job.lease is None:
        return ""
    lapsed = value[b"l"] == b"1"
    fits = lapsed if job.lapsed else job.lease.fits(float(value[b"l"]))
    return "" if fits else "I5"


def _optional(job: Job, wanted: dict[bytes, bytes]) -> Iterable[bytes]:
    if job.cookie is not None:
        wanted[b"c"] = job.cookie
    if job.fingerprint:
        wanted[b"h"] = job.fingerprint.encode()
    if job.kept is not None:
        wanted[b"r"] = job.kept
    if job.blocks:
        wanted[b"u"] = b"1"
    return {b"l"} if job.lease is not None else set()
