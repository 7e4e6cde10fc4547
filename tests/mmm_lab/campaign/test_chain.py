"""Whether another job follows: what a job's script is told at its beginning and at its end."""

import json

import pytest

from mmm.errors import LaunchError, RecordError
from mmm.history import History, write_config
from mmm_lab.campaign import chain
from mmm_lab.campaign.chain import Campaign, begin, end, read, status, stop
from support.queue import StandIn


@pytest.fixture(params=["slurm", "pbs", "flux"])
def queue(request, tmp_path, monkeypatch):
    return StandIn(tmp_path / "bin", request.param, monkeypatch)


@pytest.fixture
def campaign(queue, tmp_path):
    folder = tmp_path / "run"
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs" / "lm.sh").write_text("the script")
    made = Campaign(folder, queue.scheduler, "lm", str(folder / "jobs" / "lm.sh"), 4)
    made.write()
    return made


def environ(campaign, job):
    return {chain.queues.QUEUES[campaign.scheduler].variable: job}


@pytest.fixture
def queued(queue):
    """The id that the stand-in gives to the job of its n-th call."""
    return lambda number: f"{number}.pbs" if queue.scheduler == "pbs" else str(number)


def saved(campaign, step):
    (campaign.folder / "checkpoints" / f"step-{step}").mkdir(parents=True)


def recorded(campaign, error=None):
    write_config(campaign.folder, {"module": "lm"})
    history = History(campaign.folder, ranks=[{"host": "a"}], flush_every=1)
    history.update({"iter": 0, "loss": 1.0})
    history.close(error)


def test_three_jobs(campaign, queue, queued):
    """Each queues the next as it begins; the last one takes its own out of the queue again."""
    line = f"job 7, 1 of at most 4, from step 0; job {queued(1)} follows it"
    assert begin(campaign.folder, environ(campaign, "7")) == (True, line)
    saved(campaign, 20)
    assert end(campaign.folder, 75) == (0, f"saved at step 20; job {read(campaign.folder).queued} continues")
    line = f"job 8, 2 of at most 4, from step 20; job {queued(2)} follows it"
    assert begin(campaign.folder, environ(campaign, "8")) == (True, line)
    recorded(campaign)
    code, line = end(campaign.folder, 0)
    assert code == 0
    assert "finished, after 2 jobs" in line
    submitted, cancelled = queue.calls()[:2], queue.calls()[2:]
    after = ["-W", "depend=afterany:{}"] if queue.scheduler == "pbs" else ["--dependency=afterany:{}"]
    for (_, words, script, _), before in zip(submitted, ("7", "8"), strict=True):
        assert words[-len(after) :] == [word.format(before) for word in after]
        assert script == "the script"
    ((name, words, *_),) = cancelled
    assert " ".join([name, *words]) == f"{chain.queues.QUEUES[queue.scheduler].cancel} {queued(2)}"
    assert begin(campaign.folder, environ(campaign, queued(2))) == (
        False,
        "nothing to do: the run is finished, after 2 jobs",
    )


@pytest.mark.parametrize("code", [75, 143, 137, 124, None])
def test_two_jobs_in_a_row_that_save_nothing_are_the_last(campaign, code):
    """After a signal, a hang, or where the job was killed before it could say how it ended."""
    saved(campaign, 10)
    begin(campaign.folder, environ(campaign, "1"))
    first = code is None or end(campaign.folder, code)
    assert first is True or "step 10" in first[1]
    begin(campaign.folder, environ(campaign, "2"))
    if code is not None:
        ended, line = end(campaign.folder, code)
        assert ended == code
        assert "step 10" in line
    goes, line = begin(campaign.folder, environ(campaign, "3"))
    assert not goes
    assert "2 jobs in a row" in line


def test_as_many_jobs_as_are_allowed(campaign, queue):
    for number in range(1, 5):
        assert begin(campaign.folder, environ(campaign, str(number)))[0]
        saved(campaign, 10 * number)
        code, line = end(campaign.folder, 75)
    assert len(queue.calls()) == 3
    assert code == 75
    assert "--jobs" in line
    assert "step 40" in line


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (1, ValueError("no such layer"), "ValueError: no such layer"),
        (139, ValueError("rank 1 was killed by SIGSEGV"), ""),
        (1, RuntimeError("lost ranks 2, 3 on node7: its host is down"), ""),
        (1, RuntimeError("rank 1 (pid 7) was killed by SIGKILL on node7"), ""),
        (2, None, "exit code 2"),
    ],
)
def test_a_run_that_fails_by_itself_is_not_begun_again(campaign, code, error, words):
    begin(campaign.folder, environ(campaign, "1"))
    recorded(campaign, error)
    line = end(campaign.folder, code)[1]
    assert (words or "step 0") in line


def test_a_job_that_could_not_say_how_it_ended(campaign):
    """The next goes by the record: finished, failed, or killed on its way."""
    begin(campaign.folder, environ(campaign, "1"))
    assert begin(campaign.folder, environ(campaign, "2"))[0]  # killed before it had a record
    recorded(campaign, KeyError("x"))
    goes, line = begin(campaign.folder, environ(campaign, "3"))
    assert not goes
    assert "job 2: KeyError: 'x'" in line


def test_a_job_that_the_scheduler_begins_again_queues_no_second_one(campaign, queue):
    begin(campaign.folder, environ(campaign, "1"))
    goes, line = begin(campaign.folder, environ(campaign, "1"))
    assert goes
    assert line.startswith("job 1 begins again; ")
    assert len(queue.calls()) == 1


def test_slurms_variables_of_this_job_are_not_the_nexts(campaign, queue, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    begin(campaign.folder, environ(campaign, "1"))
    assert queue.calls()[0][3] == {"SLURM_CONF": "/etc/slurm.conf"}


def test_stop(campaign, queue, queued):
    begin(campaign.folder, environ(campaign, "1"))
    line = stop(campaign.folder)
    cancel = chain.queues.QUEUES[queue.scheduler].cancel
    assert line == f"job {queued(1)} is out of the queue; a job that still runs is ended by {cancel}"
    name, words, *_ = queue.calls()[-1]
    assert [name, *words] == [*cancel.split(), queued(1)]
    assert begin(campaign.folder, environ(campaign, "9")) == (False, "nothing to do: mmm submit --stop")
    assert stop(campaign.folder) == "it was over before: mmm submit --stop"


def test_status(campaign, queued):
    assert status(campaign.folder) == ["no job is known to wait"]
    begin(campaign.folder, environ(campaign, "7"))
    saved(campaign, 20)
    end(campaign.folder, 75)
    begin(campaign.folder, environ(campaign, "8"))
    saved(campaign, 40)
    assert status(campaign.folder) == [
        "job 7            from step 0 to 20   exit code 75",
        "job 8            from step 20 to 40   runs, or has been killed",
        f"job {queued(2)} waits",
    ]
    begin(campaign.folder, environ(campaign, "9"))
    end(campaign.folder, 2)
    assert status(campaign.folder)[1:] == [
        "job 8            from step 20 to 40   killed",
        "job 9            from step 40 to 40   exit code 2",
        "over: job 9 refuses what it was asked for (exit code 2); its output says why",
    ]


def test_no_campaign_and_a_damaged_one(campaign, tmp_path):
    with pytest.raises(RecordError, match="--until-done"):
        read(tmp_path)
    with pytest.raises(LaunchError, match="is for a job's script"):
        begin(campaign.folder, {})
    for content in ("[]", "{", '{"jobs": [1]}', json.dumps({"jobs": [], "scheduler": "lsf", "name": "a"})):
        campaign.file.write_text(content)
        with pytest.raises(RecordError):
            read(campaign.folder)
