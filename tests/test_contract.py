"""launch and the programs have the names that they agree on in a module each: they are the same."""

from mmm.runtime import contract as of_programs
from mmm_launch import contract as of_launch

CONSTANTS = [name for name in vars(of_programs) if name.isupper() and hasattr(of_launch, name)]


def test_both_sides_agree():
    assert "VERDICT_VARIABLE" in CONSTANTS
    for name in CONSTANTS:
        assert getattr(of_launch, name) == getattr(of_programs, name), name


def test_a_report_that_a_program_sends_is_read_by_launch(monkeypatch):
    import os
    import socket

    there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(of_launch.SOCKET_VARIABLE, "")
    assert not of_programs.report("user", "nobody listens", 2)
    of_launch.attach(here.detach())
    assert of_programs.report("user", "too many heads", 2)
    report = of_launch.Report.loads(there.recv(1 << 16))
    assert (report.rank, report.kind, report.text, report.exit_code) == (3, "user", "too many heads", 2)
    if os.fork() == 0:  # not the rank itself: a process that it started
        os._exit(int(of_programs.report("user", "from a child", 2)))
    assert os.wait()[1] == 0
