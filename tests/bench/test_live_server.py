"""The live view's server and command: who has the token is answered, strangers learn nothing, nobody is held up."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncline.bench.live import LiveServer, open_feed
from syncline.cli.main import main
from syncline.errors import UnsupportedError
from tests.bench.live_logs import GrowingRun, serving

pytest.importorskip("plotly", reason="the live view draws with plotly: pip install 'syncline[view]'")


@pytest.fixture
def run(tmp_path: Path) -> GrowingRun:
    made = GrowingRun(tmp_path / "run")
    made.start()
    return made


@pytest.fixture
def server(run: GrowingRun) -> Iterator[LiveServer]:
    run.evaluation(100, 0.5)
    with serving(run.folder) as made:
        yield made


def ask(
    server: LiveServer, path: str, method: str = "GET", token: bool = True, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    try:
        cookie = {"Cookie": f"a=b; syncline-{server.port}={server.token}"} if token else {}
        connection.request(method, path, headers={**cookie, **given})
        answer = connection.getresponse()
        return answer.status, answer.read(), {key.lower(): value for key, value in answer.getheaders()}
    finally:
        connection.close()


def test_the_first_visit_brings_a_cookie_that_opens_the_rest(server: LiveServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/?token={server.token}"
    status, body, headers = ask(server, f"/?token={server.token}", token=False)
    assert (status, b"<title>syncline watch" in body) == (200, True)
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    status, body, _ = ask(server, "/state.json", token=False, Cookie=cookie.partition(";")[0])
    assert status == 200
    assert json.loads(body)["workload"] == "digits"


@pytest.mark.parametrize(
    "path", ["/", "/state.json", "/plotly.js", "/nothing", "/?token=", "/?token=wrong", "/?token=é"]
)
def test_without_the_token_nothing_is_told(server: LiveServer, path: str) -> None:
    for cookie in ("", "a=b", f"syncline-{server.port}=wrong", f"syncline-{server.port}=\xe9", f"x={server.token}"):
        status, body, headers = ask(server, path.replace("é", "%C3%A9"), token=False, Cookie=cookie)
        assert status == 403
        assert b"open the whole address that syncline watch printed" in body
        assert "set-cookie" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "[::1]:80", ""]
)
def test_a_page_of_another_name_is_refused(server: LiveServer, host: str) -> None:
    status, body, _ = ask(server, "/state.json", Host=host)
    assert (status, b"127.0.0.1 or localhost" in body) == (403, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "127.0.0.1:1"])
def test_the_port_may_be_another_one_through_ssh(server: LiveServer, host: str) -> None:
    assert ask(server, "/state.json", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_get_only(server: LiveServer, method: str) -> None:
    status, _, headers = ask(server, "/state.json", method=method)
    assert (status, headers["allow"]) == (405, "GET")
    assert ask(server, "/state.json", method=method, token=False)[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/../../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/log.jsonl",
        "//etc/passwd",
        "/log.jsonl",
        "/config.json",
        "/server.py",
        "/page.html/",
        "/run.json",
        "/run.json?id=../../etc",
        "/run.json?id=-1",
        "/run.json?id=99",
        "/run.json?id=²",
        "/run.json?id=99999999999999999999",
        "/run.json?id=0&kind=../x",
    ],
)
def test_only_what_is_in_the_table_is_found(server: LiveServer, path: str) -> None:
    assert ask(server, path.replace("²", "%C2%B2"))[0] == 404


def test_what_the_page_asks_for(server: LiveServer) -> None:
    assert json.loads(ask(server, "/state.json")[1])["runs"][0]["best"] == 0.5
    assert json.loads(ask(server, "/curves.json?runs=0,7,x,-3")[1])["runs"]["0"]["metric"] == [0.5]
    assert json.loads(ask(server, "/run.json?id=0&kind=data")[1])["heat"]["kind"] == "data"
    for path in ("/app.js", "/plots.js", "/table.js", "/phrases.js", "/style.css", "/plotly.js"):
        status, body, headers = ask(server, path)
        assert (status, len(body) > 100) == (200, True)
        assert headers["x-content-type-options"] == "nosniff"
        again = ask(server, path, If_None_Match=headers["etag"])
        assert (again[0], again[1]) == (304, b"")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    small = ask(server, "/plotly.js", Accept_Encoding="gzip")
    assert small[2]["content-encoding"] == "gzip"
    assert len(small[1]) < len(body) / 2


def test_it_listens_on_the_loopback_interface_alone(server: LiveServer) -> None:
    assert server.host == "127.0.0.1"


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n\r\n",
        b"GET state.json HTTP/1.1\r\n\r\n",
        b"GET / SPDY/3\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET //[::1/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    ],
)
def test_what_is_no_request(server: LiveServer, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as strange:
        strange.sendall(said)
        with strange.makefile("rb") as answer:
            assert answer.readline().split()[1] in (b"400", b"403")
    assert ask(server, "/state.json")[0] == 200


def test_clients_that_say_nothing_or_take_nothing_hold_up_nobody(server: LiveServer) -> None:
    where = ("127.0.0.1", server.port)
    silent = socket.create_connection(where, timeout=30)
    half = socket.create_connection(where, timeout=30)
    greedy = socket.socket()
    greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    try:
        half.sendall(b"GET /state.json HT")
        greedy.connect(where)
        cookie = f"Cookie: syncline-{server.port}={server.token}".encode()
        greedy.sendall(b"GET /plotly.js HTTP/1.1\r\nHost: localhost\r\n" + cookie + b"\r\n\r\n")
        assert greedy.recv(8) == b"HTTP/1.1"
        for _ in range(3):
            assert ask(server, "/state.json")[0] == 200
        # The one with half a request is still there, and gets its answer when it goes on.
        half.sendall(b"TP/1.1\r\nHost: localhost\r\n" + cookie + b"\r\n\r\n")
        assert half.recv(12) == b"HTTP/1.1 200"
    finally:
        for one in (silent, half, greedy):
            one.close()


def test_one_that_says_nothing_for_long_is_sent_away(run: GrowingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.bench.live.server.REQUEST_TIMEOUT_S", 0.05)
    with (
        serving(run.folder) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent,
    ):
        assert silent.recv(1) == b""


def test_too_many_connections_are_closed(run: GrowingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.bench.live.server.MAX_CONNECTIONS", 2)
    with serving(run.folder) as server:
        where = ("127.0.0.1", server.port)
        held = [socket.create_connection(where, timeout=30) for _ in range(3)]
        try:
            assert held[2].recv(1) == b""
        finally:
            for one in held:
                one.close()


def test_a_port_that_is_taken(server: LiveServer, run: GrowingRun) -> None:
    with pytest.raises(UnsupportedError, match=rf"cannot listen on 127\.0\.0\.1:{server.port} .* without --port"):
        LiveServer(open_feed(run.folder), server.port)


def test_without_plotly_it_says_what_to_install(run: GrowingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'syncline\[view\]'"):
        LiveServer(open_feed(run.folder))


# The command


def test_the_command_serves_until_ctrl_c(run: GrowingRun) -> None:
    command = [sys.executable, "-m", "syncline", "watch", run.folder.name]
    with subprocess.Popen(command, cwd=run.folder.parent, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first, second = process.stdout.readline(), process.stdout.readline()
            url = first.split()[-1]
            port, token = int(url.split(":")[2].split("/")[0]), url.partition("token=")[2]
            assert f"ssh -N -L {port}:127.0.0.1:{port} " in second
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", f"/state.json?token={token}")
            assert connection.getresponse().status == 200
            connection.close()
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "the page has ended" in rest


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing"], "nothing does not exist"),
        ([], "there is no run in"),
        (["run", "--port", "70000"], "--port 70000: a port is 1 to 65535"),
    ],
)
def test_refused(
    run: GrowingRun,
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.folder.parent)
    assert main(["watch", *words]) == 2
    assert told in capsys.readouterr().err
