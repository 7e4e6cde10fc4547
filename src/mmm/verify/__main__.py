"""``python3 -m mmm.verify`` is the command."""

from mmm.verify.command import main

raise SystemExit(main())
