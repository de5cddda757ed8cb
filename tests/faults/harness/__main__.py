"""`python -m tests.faults.harness`."""

from __future__ import annotations

import sys

from tests.faults.harness.trials import main

sys.exit(main())
