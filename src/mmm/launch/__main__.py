import sys

from mmm.launch.main import main

sys.exit(main())
