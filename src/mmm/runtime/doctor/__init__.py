"""Is this machine, and this installation, fit to run? Each check says what it saw, and how to mend what is wrong.

Every check runs in a child process with a time limit: a dead file server, a stuck accelerator or a collective that
hangs becomes a finding. Nothing here imports torch but the child whose check it is.
"""

from mmm.runtime.doctor.checks import CHECKS, examine
from mmm.runtime.doctor.finding import Finding, Place, as_json, lines, summary

__all__ = ["CHECKS", "Finding", "Place", "as_json", "examine", "lines", "summary"]
