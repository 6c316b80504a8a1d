"""Access to the page of a run and to its commands, the page's process beside `tidemill up`, and the export."""

import argparse
import asyncio
import base64
import hashlib
import json
import os
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from tests.bus_fixtures import BusOpener
from tests.page_kit import HOSTILE, OPERATOR, SHOWN, VIEWER, Answer, Run, page_of, routes_of
from tests.waits import LIMIT_S
from tidemill.bus.client.addresses import parse
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.auth import credentials_file, read_credentials
from tidemill.bus.server.embedded_bus import EmbeddedBus
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.streams.dead import REQUEUE
from tidemill.bus.wire.messages import Dead
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli import main as cli
from tidemill.launch.page import export as page_export
from tidemill.launch.page import static_files
from tidemill.launch.page.access import POLICY, PageAccess, is_own_user
from tidemill.launch.page.serve import access_of
from tidemill.launch.page.static_files import joined, read_files
from tidemill.launch.run.servers import URL_FILE, keep_page
from tidemill.launch.settings.run_config import CONFIG_FILE

# ---- access


# Everything is loaded before the user changes, who may be unable to read the files of this Python.
GET_AS = """
import codecs, os, sys, urllib.request
codecs.lookup("idna")
os.setuid(int(sys.argv[2]))
print(urllib.request.urlopen(sys.argv[1]).read().decode())
"""


CONNECT_AS = """
import os, socket, sys
os.setuid(65534)
connection = socket.socket()
connection.bind(("127.0.0.2", int(sys.argv[2])))
connection.connect(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def asked_for_users(host: str) -> AsyncIterator[int]:
    """A server that answers whether its client is the own user; yields its port."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=str(await asyncio.to_thread(is_own_user, request)))

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", False), ("::1", False), ("127.0.0.1", True)])
async def test_a_connection_tells_its_user(host: str, other: bool) -> None:
    if other and os.getuid():
        pytest.skip("want root, to ask as another user")
    async with asked_for_users(host) as port:
        url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        command = [sys.executable, "-I", "-c", GET_AS, url, str(65534 if other else os.getuid())]
        child = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        output, _ = await asyncio.wait_for(child.communicate(), LIMIT_S)
    assert output.decode().strip() == str(not other)


async def test_a_connection_of_another_user_from_the_same_port_is_told_apart() -> None:
    if os.getuid():
        pytest.skip("want root, to connect as another user")
    async with asked_for_users("127.0.0.1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        own_port = writer.get_extra_info("sockname")[1]
        command = [sys.executable, "-I", "-c", CONNECT_AS, str(port), str(own_port)]
        child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert child.stdout is not None
        assert await asyncio.wait_for(child.stdout.readline(), LIMIT_S) == b"connected\n"
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), LIMIT_S)).endswith(b"True")
        writer.close()
        await asyncio.wait_for(child.communicate(b""), LIMIT_S)


TOKENS = {  # (arguments, address of the bus): whether a viewer, and an operator, needs a token
    ("", "nats://h:1"): (False, False),
    ("--token", "nats://h:1"): (True, False),
    ("--host 0.0.0.0", "nats://h:1"): (True, False),
    ("", "nats://viewer:secret@h:1"): (True, False),
    ("--operator", "nats://h:1"): (True, True),
}


def test_a_token_is_made_where_another_machine_or_another_user_could_look() -> None:
    for (words, line), needed in TOKENS.items():
        args = cli.command_parser(("dashboard",)).parse_args(["dashboard", "--bus", "nats://h:1", *words.split()])
        args.viewer_token = args.operator_token = ""
        access = access_of(args, line)
        assert (bool(access.token), bool(access.operator)) == needed, words
        assert access.guarded == needed[0] and (not access.token or len(access.token) >= 32)


def test_users_of_a_bus_alone_are_known_by_its_address(tmp_path: Path) -> None:
    """In the directory of `tidemill bus` there are no settings."""
    args = cli.command_parser(("dashboard",)).parse_args(["dashboard", "--run-dir", str(tmp_path)])
    args.viewer_token = args.operator_token = ""
    assert not access_of(args, "nats://h:1").token and access_of(args, "nats://viewer:secret@h:1").token
    (tmp_path / CONFIG_FILE).write_text("run: r\nbus:\n  auth: false\n")
    assert not access_of(args, "nats://viewer:secret@h:1").token, "made for a run that is over"


def secure(answer: Answer) -> bool:
    wanted = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return all(answer.headers.get(name) == value for name, value in wanted.items())


async def test_without_the_token_nothing_is_shown_and_every_answer_has_the_policy(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = await Run(bus).begin()
        await run.sample(await run.task(), 0)
        async with page_of(bus, access=PageAccess(VIEWER)) as page:
            cookie, page.headers = page.headers, {}
            for route in routes_of(page):
                method, path = route.replace("{name}", "app.js").split()
                for headers in ({}, {"Cookie": f"{cookie['Cookie']}x"}, {"Authorization": f"Bearer {VIEWER}"}):
                    answer = await page.request(method, path, headers=headers)
                    assert (answer.status, secure(answer)) == (401, True), (route, headers)
                    assert b"t-" not in answer.body
            assert (await page.request("GET", "/?token=wrong")).status == 401
            exchanged = await page.request("GET", f"//other.example/x?token={VIEWER}")
            assert exchanged.status in (302, 404)
            assert not exchanged.headers.get("Location", "/").startswith("//")
            exchanged = await page.request("GET", f"/api/run?token={VIEWER}")
            assert (exchanged.status, exchanged.headers["Location"], secure(exchanged)) == (302, "/api/run", True)
            set_cookie = exchanged.headers["Set-Cookie"]
            assert "HttpOnly" in set_cookie and "SameSite=Strict" in set_cookie and VIEWER not in set_cookie
            page.headers = {"Cookie": set_cookie.partition(";")[0]}
            for path, status in (("/api/run", 200), ("/api/none", 404), ("/static/none.js", 404), ("/api/text", 400)):
                answer = await page.request("GET", path)
                assert (answer.status, secure(answer)) == (status, True), path
            async with page.session.get(f"{page.url}/events", headers=page.headers) as response:
                assert response.headers["Content-Security-Policy"] == POLICY
            for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "[::1", ""):
                answer = await page.request("GET", "/api/run", headers={"Host": host})
                assert (answer.status, secure(answer)) == (421, True), host
            for host in ("localhost:9", "127.0.0.1", "[::1]:80"):
                assert (await page.request("GET", "/api/run", headers={"Host": host})).status == 200
            names = ("..%2f..%2fpyproject.toml", "%2e%2e/server.py", "access.py", "")
            assert {(await page.request("GET", f"/static/{name}")).status for name in names} == {404}


async def test_a_viewers_page_has_no_command_and_an_operators_wants_cookie_and_origin(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = await Run(bus).begin()
        task = await run.task()
        await bus.dead.store(Dead(task=task.id, reason="x", attempts=3, actor="w1", prompt="p", root=task.id))
        body = {"counts": {"actor": 3}}
        async with page_of(bus) as page:
            assert not [route for route in routes_of(page) if not route.startswith("GET ")]
            assert (await page.request("POST", "/do/scale", json=body)).status in (404, 405)
            assert (await page.get("dead"))["dead"][0]["decision"] is None
        access = PageAccess(VIEWER, OPERATOR)
        async with page_of(bus, access=access, operator=True) as page:
            origin = {"Origin": page.url}
            viewer = {"Cookie": f"{access.cookie_name}={access.cookie('viewer')}"}
            for headers, status in (({}, 403), ({"Origin": "http://evil.example"}, 403), (viewer | origin, 401)):
                answer = await page.request("POST", "/do/scale", json=body, headers=headers)
                assert (answer.status, secure(answer)) == (status, True), headers
            for cookie, rights in ((viewer, "viewer"), ({}, "operator")):
                for path in ("/api/run", "/api/overview"):
                    assert (await page.request("GET", path, headers=cookie)).json["rights"] == rights
            assert await bus.rows("wanted").all() == {}
            assert (await page.request("POST", "/do/scale", json=body, headers=origin)).status == 200
            assert (await bus.rows("wanted").all())["all"][0] == {"actor": 3}
            for bad in ({}, {"counts": {"actor": -1}}, {"counts": {"learner": 1}}, {"counts": {"actor": 1.5}}):
                assert (await page.request("POST", "/do/scale", json=bad, headers=origin)).status == 400, bad
            answer = await page.request("POST", "/do/requeue", json={"tasks": [task.id]}, headers=origin)
            assert (answer.status, answer.json["decided"]) == (200, [task.id])
            assert (await bus.dead.decisions())[task.id].word == REQUEUE
            assert (await page.request("POST", "/do/drop", json={"tasks": [99]}, headers=origin)).status == 400


HOST_ROW = {"role": "host", "id": "h1", "host": "m", "pid": 7, "phase": "working", "pool": "p"}


async def test_a_fleet_has_its_live_hosts_with_running_and_desired_processes(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await Run(bus).begin()
        await bus.rows("wanted").put("pool.p", {"actor": 3})
        beat = HeartbeatPublisher(bus, LiveRow(**HOST_ROW, load={"actors": 2.0}))  # type: ignore[arg-type]
        async with beat, page_of(bus) as page:
            fleet = await page.until("fleet", lambda answer: answer["hosts"] and answer["hosts"][0]["desired"]["actor"])
            (host,) = fleet["hosts"]
            assert (host["name"], host["pool"]) == ("h1", "p")
            assert host["running"] == {"engine": 0, "scorer": 0, "actor": 2}
            assert host["desired"] == {"engine": 0, "scorer": 0, "actor": 3}


FOREIGN = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}


async def test_a_page_of_another_host_causes_no_work(open_bus: BusOpener) -> None:
    """It cannot read an answer, but `<img src=.../api/flow?check=1>` would read every sample of the run."""
    async with open_bus() as bus:
        await Run(bus).begin()
        async with page_of(bus) as page:
            await page.until("run", lambda answer: not answer["loading"] and page.reader.samples is not None)
            for site in ("cross-site", "same-site"):  # the latter: another port of this machine
                for route in routes_of(page):
                    path = route.removeprefix("GET ").replace("{name}", "app.js")
                    answer = await page.request("GET", f"{path}?check=1", headers=FOREIGN | {"Sec-Fetch-Site": site})
                    assert (answer.status, secure(answer)) == (403, True), (site, path)
            assert (await page.get("flow"))["audit"]["state"] == "not yet"
            link = FOREIGN | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
            assert (await page.request("GET", "/", headers=link)).status == 200, "a quoted link may be followed"
            assert (await page.request("GET", "/api/run", headers=link)).status == 403
            for site in ("same-origin", "none"):
                assert (await page.request("GET", "/api/run", headers={"Sec-Fetch-Site": site})).status == 200
            await page.get("flow", check=1)
            await page.until("flow", lambda answer: answer["audit"]["state"] == "checked")
            before = page.reader.ledger.audited
            await page.get("flow", check=1)
            assert page.reader.ledger.audited is before, "at most once a minute"


async def test_a_public_address_wants_a_token(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await Run(bus).begin()
        async with page_of(bus) as page:
            with pytest.raises(ValueError, match="--host"):
                async with page.server.serving("0.0.0.0", 0):
                    pass


async def test_a_viewer_of_a_bus_with_users_sees_everything(tmp_path: Path) -> None:
    """The page needs the rights of `tidemill tail`, and no more."""
    config = BusConfig(auth=True, port=-1)
    servers = EmbeddedBus(tmp_path / "bus", "r", config, tmp_path / "auth")
    servers.start()
    try:
        lines = {}
        for user in ("learner", "viewer"):
            name, password = read_credentials(credentials_file(tmp_path / "auth", user))
            lines[user] = replace(parse(servers.url), user=name, password=password).line()
        async with connect(lines["learner"], "r", config, name="learner") as learner:
            await learner.create_layout()
            run = await Run(learner).begin()
            seq = await run.sample(task := await run.task(), 0)
            await run.plan({task.id: [seq]})
            await run.done(1, data__reward_mean=0.5)
            async with connect(lines["viewer"], "r", config, name="dashboard") as viewer:
                async with page_of(viewer, url=lines["viewer"]) as page:
                    await page.until("run", lambda answer: answer["step"] == 1)
                    query = {"seq": seq, "task": task.id, "step": 1, "field": "response"}
                    for route in routes_of(page):
                        if "/api/" in route:
                            await page.get(route.removeprefix("GET /api/"), **query)
    finally:
        servers.stop()


async def test_up_keeps_a_page_beside_the_run(open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path) -> None:
    """It is a process of its own: killed, it is reported; and it ends with `up`."""
    reports: asyncio.Queue[str] = asyncio.Queue()
    config = {"run": "t", "bus": {"url": nats_server.url, "auth": False}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    async with open_bus() as bus, asyncio.timeout(LIMIT_S):
        await Run(bus).begin()
        for is_killed in (True, False):
            keeping = asyncio.create_task(keep_page(tmp_path, bus.run, nats_server.url, reports.put_nowait))
            url = (await reports.get()).rpartition(" ")[2]
            assert (tmp_path / URL_FILE).stat().st_mode & 0o077 == 0
            async with aiohttp.ClientSession() as session, session.get(f"{url}api/run") as response:
                assert (await response.json())["run"] == bus.run
            (child,) = [one for one in psutil.Process().children() if "dashboard" in one.cmdline()]
            if is_killed:
                child.kill()
                assert "has ended with code -9" in await reports.get()
            keeping.cancel()
            await asyncio.wait({keeping})
            assert not child.is_running() and not (tmp_path / URL_FILE).exists()


# ---- export


MODULES = {
    "app.js": 'import { b } from "./b.js";\nimport { c } from "./c.js";\nconst a = b + c;\n',
    "b.js": 'import { c } from "./c.js";\nexport const b = c;\n',
    "c.js": "export const c = 1;\nexport function used() {}\n",
}
BAD = {
    "no cycle": {"c.js": 'import { b } from "./b.js";\nexport const c = b;\n'},
    "one module": {"c.js": "export const c = 1;\nconst a = 2;\n"},
    "of one line": {"b.js": 'import * as c from "./c.js";\nexport const b = c;\n'},
    "end of a script": {"c.js": 'export const c = "</script>";\n'},
}


def test_modules_are_joined_behind_those_that_they_import(tmp_path: Path) -> None:
    def written(changes: dict[str, str]) -> Path:
        for name, text in {**MODULES, **changes}.items():
            (tmp_path / name).write_text(text)
        return tmp_path

    assert joined(written({})) == "const c = 1;\nfunction used() {}\n\nconst b = c;\n\nconst a = b + c;\n"
    for reason, changes in BAD.items():
        with pytest.raises(ValueError, match=reason):
            joined(written(changes))


async def test_an_export_holds_the_answers_in_one_file_that_allows_only_itself(
    open_bus: BusOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = tmp_path / "static"
    static.mkdir()
    for name, text in {**MODULES, "app.css": "p { color: red }", "icon.svg": "<svg/>"}.items():
        (static / name).write_text(text)
    monkeypatch.setattr(static_files, "STATIC", static)
    file = tmp_path / "run.html"
    async with open_bus() as bus:
        run = await Run(bus).begin()
        seqs: dict[int, list[int]] = {}
        for _ in range(3):
            task = await run.task()
            seqs[task.id] = [await run.sample(task, 0, response=HOSTILE + "</script>")]
        await run.plan(seqs)
        await run.done(1, data__reward_mean=0.25)
        args = argparse.Namespace(export=file, ended=True, run_dir="")
        assert await page_export.export(bus, args) == 0
        page = file.read_text()
        monkeypatch.setattr(page_export, "MAX_BYTES", len(page) - 4_000)
        await page_export.export(bus, args)
    (data,) = re.findall(r'<script type="application/json" id="exported">(.*?)</script>', page, re.DOTALL)
    answers = json.loads(data)["answers"]
    assert answers["/api/run"]["mode"] == "exported"
    assert answers["/api/series"]["series"]["data/reward_mean"] == [[1, 0.25]]
    assert answers["/api/flow"]["audit"]["lost"] == 0
    assert answers["/api/sample?seq=2"]["response"]["text"].startswith(SHOWN)
    assert answers["/api/batch?step=1"]["samples"] == 3
    assert page.count("</script>") == 2 and "<img" not in page and "\u202e" not in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for kind, text in (("script", joined(static)), ("style", "p { color: red }")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy and text in page
    assert "default-src 'none'" in policy and not re.search(r"(src|href)=\"(?!data:)", page)
    small = file.read_text()
    assert len(small) < len(page) and "would be too large" in small


async def test_files_are_sent_once_and_modules_as_one(open_bus: BusOpener) -> None:
    """A browser that has a file asks with its tag, and gets no second copy of it."""
    async with open_bus() as bus, page_of(bus) as page:
        packed = {"Accept-Encoding": "deflate"}
        for name, file in read_files().items():
            answer = await page.request("GET", f"/static/{name}", headers=packed)
            assert (answer.status, answer.body) == (200, file.body)
            again = await page.request("GET", f"/static/{name}", headers={"If-None-Match": answer.headers["ETag"]})
            assert (again.status, again.body, secure(again)) == (304, b"", True)
            other = await page.request("GET", f"/static/{name}", headers={"If-None-Match": '"x"', **packed})
            assert other.body == file.body
        script = (await page.request("GET", "/static/app.js")).body
        assert b"\nimport " not in script and b"class Lanes " in script
