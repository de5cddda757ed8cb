"""`python -m examples.chat_backend`: everything for a try-out."""

from __future__ import annotations

import sys

from .run import main

sys.exit(main())
