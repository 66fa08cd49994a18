"""Worker processes: right values, deadlines, crashes, and nothing left behind."""

import asyncio
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

import mrgym
from mrgym.errors import ConfigError, RewardContractError, ScoreError
from mrgym.scoring import InlineScorer, WorkerPool, WorkerScorer
from mrgym.scoring._frames import Reply, decode_reply, encode_reply, to_wire

FUNCTIONS = """
import ctypes, mmap, os, re, resource, subprocess, sys, time
import mrgym

def echo(value): return value
def absent(): return {"a": mrgym.ABSENT, "b": [1, None, "x", True, mrgym.ABSENT]}
def fail(text): raise ValueError(text)
def leave(): sys.exit("bye")
def exit_now(code): os._exit(code)
def segfault(): ctypes.string_at(0)
def recurse(): return recurse()
def hog(): return len(bytearray(4 << 30))
def unsendable(): return {1, 2}
def huge(): return b"x" * (65 << 20)
def nap(seconds): time.sleep(seconds); return seconds
def spin():
    while True: pass
def hold_the_gil(): re.match(r"(a+)+$", "a" * 60 + "b")
def pid(): return os.getpid()
def environment(name): return os.environ.get(name)
def talk():
    print("printed")
    os.write(1, b"written")
    sys.__stdout__.write("more")
    return "quiet"
def child_of_mine(path):
    child = subprocess.Popen(["sleep", "60"])
    open(path, "w").write(str(child.pid))
    spin()
def address_limit(): return resource.getrlimit(resource.RLIMIT_AS)[0]
kept = []
def leak(megabytes):
    kept.append(mmap.mmap(-1, megabytes << 20))
    return len(kept)
class Liar:
    def __reduce__(self): return (exec, ("raise KeyError('from unpickling')",))
"""

ENVS = '''
import ctypes, os, sys, time
import numpy as np
import mrgym
from mrgym.errors import RewardContractError

class Tasks:
    def tasks(self, split):
        return [mrgym.Task(f"{split} {i}", answer=str(i), id=f"{split}-{i}") for i in range(4)]

class Every(Tasks, mrgym.MultiTurnEnv):
    """One method of every kind."""
    @mrgym.component(low=0, high=1)
    def right(self, task, completion): return task.answer in completion
    @mrgym.component(low=0, high=100)
    def length(self, task, completion): return np.int64(len(completion))
    @mrgym.component(low=0, high=100, optional=True)
    def maybe(self, task, completion): return mrgym.ABSENT if len(completion) > 3 else 0.25
    @mrgym.component(low=0, high=100)
    async def later(self, task, completion): return float(completion.token_ids[0])
    @mrgym.component(low=0, high=100)
    def turns(self, state, completion): return state.turn + len(state.messages) + state.data["x"]
    @mrgym.component(low=0, high=100, batched=True)
    def together(self, tasks, completions): return np.arange(len(completions)) / 4
    @mrgym.component(low=0, high=100, batched=True)
    async def together_later(self, states, completions): return [s.turn for s in states]
    @mrgym.component(low=0, high=100)
    def broken(self, task, completion):
        if "break" in completion: raise KeyError(str(completion))
        return 1
    def start(self, task, rng):
        state = super().start(task, rng)
        state.data["x"] = 7
        return state

class AllAtOnce(Tasks, mrgym.SingleTurnEnv):
    components = mrgym.components(a=mrgym.Component(), b=mrgym.Component(optional=True))
    def scores(self, task, completion):
        return {"a": 1, "b": mrgym.ABSENT} if completion != "odd" else 3

class Trouble(Tasks, mrgym.SingleTurnEnv):
    """The completion says what goes wrong."""
    bonus = 0.0
    @mrgym.component(low=0, high=1)
    def fine(self, task, completion): return 1.0
    @mrgym.component(low=0, high=1)
    def risky(self, task, completion):
        if completion == "hang":
            while True: pass
        if completion == "exit": os._exit(3)
        if completion == "sys.exit": sys.exit(4)
        if completion == "segfault": ctypes.string_at(0)
        if completion == "hog": return len(bytearray(4 << 30))
        if completion == "recurse": return self.risky(task, completion)
        if completion == "contract": raise RewardContractError("Trouble: got it; mend")
        if completion == "text": return "1.0"
        if completion == "print": print("hello"); os.write(1, b"raw bytes")
        return 0.5 + self.bonus

class SlowBatch(Tasks, mrgym.SingleTurnEnv):
    batch_hangs = True
    @mrgym.component(low=0, high=1)
    def single(self, task, completion): return 1.0
    @mrgym.component(low=0, high=1, batched=True)
    def listed(self, tasks, completions):
        if self.batch_hangs: time.sleep(60)
        return [0.5] * (len(tasks) if completions[0] != "short" else 1)

class AsyncHang(Tasks, mrgym.SingleTurnEnv):
    @mrgym.component(low=0, high=1)
    async def judged(self, task, completion):
        import asyncio
        await asyncio.sleep(60 if completion == "hang" else 0)
        return 1.0

class Slow(Tasks, mrgym.SingleTurnEnv):
    """Loads for longer than the deadline of a call."""
    def __setstate__(self, state):
        time.sleep(0.6)
        self.__dict__.update(state)
    @mrgym.component(low=0, high=1)
    def one(self, task, completion): return 1.0

class Unloadable(Tasks, mrgym.SingleTurnEnv):
    def __setstate__(self, state): raise OSError("no such table")
    @mrgym.component(low=0, high=1)
    def one(self, task, completion): return 1.0

def right(task, completion): return 1.0

def in_a_daemon(results):
    from mrgym.scoring import WorkerScorer
    import numpy as np
    env = Trouble()
    task = env.task_source("train")[0]
    scorer = WorkerScorer(deadline=0.5)
    said = [mrgym.Completion(text) for text in ("hang", "good")]
    states = [env.start(task, np.random.default_rng(0)) for _ in said]
    results.put([outcome.status for outcome in scorer.score(env, states, said)])
    scorer.close()
'''


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """The module of functions and the one of environments, importable here and in workers."""
    folder = tmp_path_factory.mktemp("importable")
    tag = uuid.uuid4().hex[:8]
    (folder / f"functions_{tag}.py").write_text(FUNCTIONS)
    (folder / f"envs_{tag}.py").write_text(ENVS)
    sys.path.insert(0, str(folder))
    yield __import__(f"functions_{tag}"), __import__(f"envs_{tag}")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def functions(modules):
    return modules[0]


@pytest.fixture(scope="module")
def envs(modules):
    return modules[1]


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(1, deadline=0.5) as shared:
        yield shared


@pytest.fixture(scope="module")
def patient():
    """A pool for what must not end by its deadline, however busy the machine is."""
    with WorkerPool(1, deadline=20) as shared:
        yield shared


@pytest.fixture(scope="module")
def scorer():
    shared = WorkerScorer(1, deadline=0.5)
    yield shared
    shared.close()


def one(pool, function, *arguments):
    return pool.map(function, [arguments])[0]


def episodes(env, texts, split="train"):
    tasks = env.task_source(split)
    completions = [
        mrgym.Completion(text, token_ids=(i, 5), sampler_logprobs=(-1.0, -2.0))
        for i, text in enumerate(texts)
    ]
    states = [env.start(tasks[i % len(tasks)], np.random.default_rng(i)) for i in range(len(texts))]
    return states, completions


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, within=10.0):
    end = time.monotonic() + within
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.02)
    return not any(map(alive, pids))


# The pool


@pytest.mark.parametrize(
    "value", [None, True, 3, -1.5, "text", b"bytes", [1, [2.0]], {"a": {"b": []}}, float("inf")]
)
def test_plain_values_come_back(pool, functions, value):
    result = one(pool, functions.echo, value)
    assert (result.status, result.value, result.error) == ("ok", value, None)
    assert type(result.value) is type(value)


def test_absent_and_numpy_values_come_back(pool, functions):
    assert one(pool, functions.absent).value == {
        "a": mrgym.ABSENT,
        "b": [1, None, "x", True, mrgym.ABSENT],
    }
    assert one(pool, functions.echo, np.float32(0.5)).value == 0.5
    assert one(pool, functions.echo, np.arange(3)).value == [0, 1, 2]
    assert one(pool, functions.echo, mrgym.Completion("abc")).value == "abc"


def test_order_is_kept_across_workers(functions):
    with WorkerPool(2, deadline=5) as pool:
        results = pool.map(functions.echo, [(i,) for i in range(100)])
        assert [r.value for r in results] == list(range(100))
        assert len(pool.pids) == 2
        assert pool.map(functions.echo, []) == []


def test_workers_are_lazy_reused_and_few_when_few_are_needed(functions):
    with WorkerPool(4, deadline=5) as pool:
        assert pool.pids == []
        first = one(pool, functions.pid).value
        assert one(pool, functions.pid).value == first
        assert pool.pids == [first] != [os.getpid()]


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("fail", ("why",), "ValueError('why')"),
        ("leave", (), "SystemExit('bye')"),
        ("exit_now", (3,), "exit code 3"),
        ("segfault", (), "SIGSEGV"),
        ("recurse", (), "RecursionError"),
        ("hog", (), "MemoryError"),
        ("unsendable", (), "got a set"),
        ("huge", (), "broken reply"),
        ("echo", (1, 2), "TypeError"),
        ("echo", (2**80,), "OverflowError"),
    ],
)
def test_a_failure_is_reported_and_the_next_call_served(
    patient, functions, name, arguments, wanted
):
    result = one(patient, getattr(functions, name), *arguments)
    assert result.status == "error"
    assert wanted in result.error
    assert one(patient, functions.echo, 1).value == 1


@pytest.mark.parametrize("name", ["spin", "hold_the_gil"])
def test_a_hang_is_ended_at_a_fractional_deadline(pool, functions, name):
    one(pool, functions.echo, 0)
    began = time.monotonic()
    result = one(pool, getattr(functions, name))
    assert (result.status, result.error) == ("timeout", "no result within 0.5 s")
    assert 0.4 < time.monotonic() - began < 5
    assert one(pool, functions.echo, 1).value == 1


def test_waiting_for_a_worker_does_not_count(functions):
    with WorkerPool(1, deadline=0.6) as pool:
        results = pool.map(functions.nap, [(0.2,)] * 4)
        assert [r.status for r in results] == ["ok"] * 4


def test_a_hang_takes_the_processes_it_started_with_it(pool, functions, tmp_path):
    assert one(pool, functions.child_of_mine, str(tmp_path / "pid")).status == "timeout"
    assert gone([int((tmp_path / "pid").read_text())])


def test_a_worker_that_died_while_idle_is_replaced(pool, functions):
    os.kill(one(pool, functions.pid).value, signal.SIGKILL)
    time.sleep(0.05)
    assert one(pool, functions.echo, 1).value == 1


def test_a_worker_that_is_nearly_full_is_replaced(functions):
    with WorkerPool(1, deadline=5, memory_limit=200 << 20) as pool:
        counts = [one(pool, functions.leak, 100).value for _ in range(4)]
    assert counts == [1, 2, 1, 2]


def test_no_memory_limit(functions):
    with WorkerPool(1, deadline=5, memory_limit=None) as pool:
        assert one(pool, functions.address_limit).value == functions.address_limit()


def test_prints_do_not_disturb_the_channel(pool, functions):
    assert one(pool, functions.talk).value == "quiet"


def test_workers_compute_on_one_thread(pool, functions):
    assert one(pool, functions.environment, "OMP_NUM_THREADS").value == "1"


def test_arguments_that_fail_to_unpickle_are_an_error(pool, functions):
    result = one(pool, functions.echo, functions.Liar())
    assert (result.status, result.error) == ("error", "KeyError('from unpickling')")


def test_what_cannot_be_pickled_is_refused_with_a_remedy(pool, functions):
    with pytest.raises(ScoreError, match=r"cannot be pickled .*module"):
        one(pool, lambda: 1)
    with pytest.raises(ScoreError, match=r"^echo: got something that cannot be pickled"):
        one(pool, functions.echo, threading.Lock())


def test_a_path_added_later_reaches_running_workers(pool, tmp_path, monkeypatch):
    (tmp_path / "added_later.py").write_text("def answer(): return 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    import added_later

    assert one(pool, added_later.answer).value == 42


@pytest.mark.parametrize(
    "options",
    [{"workers": 0}, {"deadline": 0}, {"deadline": float("nan")}, {"memory_limit": 0}],
)
def test_numbers_that_cannot_work(options):
    with pytest.raises(ConfigError, match="WorkerPool"):
        WorkerPool(**{"deadline": 1.0, **options})


def test_a_worker_that_does_not_start_in_time(functions):
    with (
        WorkerPool(1, deadline=1, start_timeout=0.01) as pool,
        pytest.raises(ScoreError, match="start_timeout"),
    ):
        one(pool, functions.echo, 1)


def test_replies_carry_data_only():
    reply = decode_reply(encode_reply(Reply({"x": to_wire(mrgym.ABSENT)})))
    assert reply.value == {"x": mrgym.ABSENT}
    with pytest.raises(Exception, match=r"msgpack|malformed|Expected"):
        decode_reply(pickle.dumps(Reply()))


def test_close_ends_everything_and_refuses_calls(functions):
    pool = WorkerPool(2, deadline=60)
    pool.map(functions.pid, [()] * 2)
    pids = pool.pids
    caught = queue.Queue()

    def hang():
        try:
            pool.map(functions.spin, [()] * 5)
        except ScoreError as error:
            caught.put(error)

    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.3)
    pool.close()
    thread.join(10)
    assert "closed" in str(caught.get(timeout=1))
    assert not any(map(alive, pids))
    assert pool.pids == []
    pool.close()
    with pytest.raises(ScoreError, match="closed"):
        pool.map(functions.echo, [(1,)])


def test_a_forgotten_pool_cleans_up(functions):
    pool = WorkerPool(1, deadline=5)
    pids = [one(pool, functions.pid).value]
    del pool
    assert gone(pids)


def test_several_threads_share_a_pool(functions):
    with WorkerPool(2, deadline=5) as pool:
        results = {}

        def work(start):
            results[start] = pool.map(functions.echo, [(start + i,) for i in range(30)])

        threads = [threading.Thread(target=work, args=(100 * t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for start, got in results.items():
        assert [r.value for r in got] == [start + i for i in range(30)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_workers_of_its_own(pool, functions):
    parents = one(pool, functions.pid).value
    child = os.fork()
    if child == 0:
        try:
            own = one(pool, functions.pid).value
            pool.close()
            os._exit(0 if own != parents else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert one(pool, functions.pid).value == parents


SCRIPT = """
import os, signal, sys, time
import mrgym
from mrgym.scoring import WorkerPool

def double(x): return 2 * x
def hang():
    import re
    re.match(r"(a+)+$", "a" * 60 + "b")

{guard}
    pool = WorkerPool(1, deadline=60)
    print(pool.map(double, [(21,)])[0].value, *pool.pids, flush=True)
    {then}
"""


def script(tmp_path, then="", guard='if __name__ == "__main__":'):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).format(guard=guard, then=then))
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_functions_of_the_main_script_and_an_exit_without_close(tmp_path):
    out, err = script(tmp_path).communicate(timeout=30)
    assert out.split()[0] == "42", err
    assert gone([int(out.split()[1])])


def test_an_exit_while_a_call_runs(tmp_path):
    then = "import threading; threading.Thread(target=pool.map, args=(hang, [()]), daemon=True)"
    process = script(tmp_path, f"{then}.start(); time.sleep(0.2)")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert gone([int(out.split()[1])])


def test_an_unguarded_script_is_told_so(tmp_path):
    out, err = script(tmp_path, guard="if True:").communicate(timeout=30)
    assert out == ""
    assert "put what the script does under if __name__ ==" in err


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a busy worker on Linux only")
@pytest.mark.parametrize("then", ["time.sleep(60)", "pool.map(hang, [()])"])
def test_workers_end_with_a_killed_parent(tmp_path, then):
    process = script(tmp_path, then)
    pid = int(process.stdout.readline().split()[1])
    time.sleep(0.3)
    assert alive(pid)
    process.kill()
    process.communicate()
    assert gone([pid])


# The scorer


def test_scores_equal_those_of_the_inline_scorer(scorer, envs):
    env = envs.Every()
    states, completions = episodes(env, ["0", "1 and more", "break", "zzz", "4"])
    got = scorer.score(env, states, completions)
    wanted = InlineScorer().score(env, states, completions)
    assert [o.status for o in got] == ["ok", "ok", "error", "ok", "ok"]
    assert [(o.scores, o.status, o.error) for o in got] == [
        (o.scores, o.status, o.error) for o in wanted
    ]
    assert scorer.score(env, [], []) == []


def test_one_method_for_all_scores(scorer, envs):
    env = envs.AllAtOnce()
    states, completions = episodes(env, ["even"])
    assert scorer.score(env, states, completions)[0].scores == {"a": 1, "b": mrgym.ABSENT}
    with pytest.raises(RewardContractError, match=r"^scores: got 3, expected a mapping"):
        scorer.score(env, *episodes(env, ["odd"]))


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("hang", "timeout", "risky: no result within 0.5 s"),
        ("exit", "error", "risky: worker process ended with exit code 3"),
        ("sys.exit", "error", "risky: SystemExit(4)"),
        ("segfault", "error", "risky: worker process was killed by SIGSEGV"),
        ("hog", "error", "risky: MemoryError()"),
        ("recurse", "error", "risky: RecursionError("),
    ],
)
def test_a_failure_names_the_component_and_spares_the_others(scorer, envs, text, status, error):
    env = envs.Trouble()
    bad, good = scorer.score(env, *episodes(env, [text, "good"]))
    assert bad.status == status
    assert bad.error.startswith(error)
    assert (good.scores, good.status) == ({"fine": 1.0, "risky": 0.5}, "ok")


def test_prints_do_not_disturb_scores(scorer, envs):
    env = envs.Trouble()
    assert scorer.score(env, *episodes(env, ["print"]))[0].scores == {"fine": 1.0, "risky": 0.5}


def test_contract_errors_are_raised_here(scorer, envs):
    env = envs.Trouble()
    with pytest.raises(RewardContractError, match=r"^Trouble: got it; mend$"):
        scorer.score(env, *episodes(env, ["good", "contract"]))
    with pytest.raises(RewardContractError, match=r"Trouble, task train-0: got risky='1.0'"):
        scorer.score(env, *episodes(env, ["text"]))
    env = envs.SlowBatch()
    env.batch_hangs = False
    with pytest.raises(RewardContractError, match="got 1 values for 2 completions"):
        scorer.score(env, *episodes(env, ["short", "list"]))


def test_a_batch_that_hangs(scorer, envs):
    env = envs.SlowBatch()
    outcomes = scorer.score(env, *episodes(env, ["a", "b"]))
    assert [o.status for o in outcomes] == ["timeout"] * 2
    assert [o.error for o in outcomes] == ["listed: no result within 0.5 s"] * 2


def test_an_async_function_that_hangs(scorer, envs):
    env = envs.AsyncHang()
    bad, good = scorer.score(env, *episodes(env, ["hang", "good"]))
    assert (bad.status, bad.error) == ("timeout", "judged: no result within 0.5 s")
    assert good.scores == {"judged": 1.0}


def test_loading_does_not_count_against_the_deadline(scorer, envs):
    env = envs.Slow()
    assert scorer.score(env, *episodes(env, ["a"]))[0].scores == {"one": 1.0}


def test_an_attribute_set_anew_is_shipped_anew(scorer, envs):
    env = envs.Trouble()
    before = scorer.score(env, *episodes(env, ["good"]))[0].scores["risky"]
    env.bonus = 0.25
    assert scorer.score(env, *episodes(env, ["good"]))[0].scores["risky"] == before + 0.25


def test_many_environments_take_turns(scorer, envs):
    many = [envs.Trouble() for _ in range(12)]
    for i, env in enumerate(many):
        env.bonus = i / 64
    for _ in range(2):
        for i, env in enumerate(many):
            assert scorer.score(env, *episodes(env, [""]))[0].scores["risky"] == 0.5 + i / 64


def test_environments_made_of_functions(scorer, envs):
    env = mrgym.from_functions([mrgym.Task(f"question {i}") for i in range(30)], [envs.right])
    assert scorer.score(env, *episodes(env, ["a"]))[0].scores == {"right": 1.0}


def test_environments_that_cannot_be_shipped(scorer, envs):
    env = mrgym.from_functions(
        [mrgym.Task(prompt=f"question {i}") for i in range(30)], {"x": lambda task, completion: 1}
    )
    with pytest.raises(ScoreError, match=r"cannot be pickled .*InlineScorer"):
        scorer.score(env, *episodes(env, ["a"]))
    env = envs.Trouble()
    assert scorer.score(env, *episodes(env, ["a"]))[0].status == "ok"
    pids, env = scorer.pids, envs.Unloadable()
    with pytest.raises(ScoreError, match=r"^Unloadable: got OSError\('no such table'\)"):
        scorer.score(env, *episodes(env, ["a"]))
    assert scorer.pids == pids


def test_from_a_thread_and_inside_an_event_loop(scorer, envs):
    env = envs.Trouble()
    work = episodes(env, ["hang", "good"])
    found = []
    thread = threading.Thread(target=lambda: found.extend(scorer.score(env, *work)))
    thread.start()
    thread.join()
    assert [o.status for o in found] == ["timeout", "ok"]

    async def main():
        fine = await asyncio.to_thread(scorer.score, env, *episodes(env, ["good"]))
        return fine + scorer.score(env, *work)

    assert [o.status for o in asyncio.run(main())] == ["ok", "timeout", "ok"]


def test_a_worker_outlives_the_thread_that_first_called(envs):
    env = envs.Trouble()
    scorer = WorkerScorer()
    work = episodes(env, ["good"])
    thread = threading.Thread(target=scorer.score, args=(env, *work))
    thread.start()
    thread.join()
    pids = scorer.pids
    time.sleep(0.1)
    assert scorer.score(env, *work)[0].status == "ok"
    assert scorer.pids == pids
    scorer.close()
    assert not any(map(alive, pids))


def test_inside_a_daemonic_process(envs):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=envs.in_a_daemon, args=(results,), daemon=True)
    process.start()
    assert results.get(timeout=30) == ["timeout", "ok"]
    process.join(10)
    assert process.exitcode == 0


def test_groups_with_one_bad_rollout(scorer, envs):
    env = envs.Trouble()
    tasks = list(env.task_source("train"))[:2]
    sampler = mrgym.ScriptedSampler(["good", "hang", "good", "good"])
    groups = mrgym.run_groups(env, sampler, tasks, 2, mrgym.SamplingParams(), scorer=scorer, seed=1)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [r.status for r in rollouts] == ["ok", "timeout", "ok", "ok"]
    assert [r.components for r in rollouts if r.status == "ok"] == [{"fine": 1.0, "risky": 0.5}] * 3
    assert rollouts[1].components == {}
    assert rollouts[1].error == "risky: no result within 0.5 s"
