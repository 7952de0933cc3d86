"""`python -m syncline.server` with an echo in the place of the real server."""

from __future__ import annotations

import sys

from syncline.server import server
from syncline.server.__main__ import main
from tests.server.network_cases import serve

if __name__ == "__main__":
    server.__dict__["serve"] = serve
    sys.exit(main())
