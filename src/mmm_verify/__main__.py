"""``python3 -m mmm_verify`` is the command."""

from mmm_verify.command import main

raise SystemExit(main())
