import asyncio, time
import numpy as np
from bus.messages import *
from bus.epoch import raise_epoch
from bus.live import *


def sample(run, task=1, index=0, R=20):
    return Sample(
        run=run,
        task=task,
        index=index,
        group_size=8,
        attempt="abc",
        prompt="hello",
        tokens=np.arange(R + 5, dtype=np.int32),
        response_length=R,
        response="x",
        rollout_log_probs=-np.ones(R, np.float32),
        loss_mask=np.ones(R, np.uint8),
        spans=(Span(version=1, num_tokens=R),),
        reward=1.0,
        status=Status.COMPLETED,
        sampling=Sampling(),
        actor="a1",
    )


def task(run, epoch, offset=0):
    return Task(
        run=run,
        epoch=epoch,
        prompt="p",
        prompt_tokens=np.arange(3, dtype=np.int32),
        group_size=2,
        sampling=Sampling(),
        prompt_epoch=0,
        offset=offset,
    )


async def test_all(open_bus, nats_server):
    async with open_bus() as bus:
        await bus.create_layout()
        t = time.time()
        seqs = await asyncio.gather(*[bus.samples.publish(sample(bus.run, index=i)) for i in range(8)])
        print(seqs, time.time() - t)
        r = bus.samples.read(None)
        for _ in range(8):
            x = await anext(r)
            print(x.seq, x.pending, x.headers, type(x.sample).__name__)
        nats_server.kill()
        t = time.time()
        nats_server.start()
        await bus.samples.publish(sample(bus.run, index=1, task=2))
        print("pub after", time.time() - t)
        x = await anext(r)
        print(x.seq, time.time() - t)
        await r.aclose()
        e = await raise_epoch(bus)
        await bus.tasks.fence(e)
        ids = [await bus.tasks.issue(task(bus.run, e, i)) for i in range(3)]
        print(ids)
        print([t.id async for t in bus.tasks.scan(1)])
        t = time.time()
        l = await bus.tasks.lease(1)
        print(l.task.id, l.deliveries, time.time() - t, await bus.tasks.backlog())
        print(await l.settle(), await bus.tasks.backlog())
        l = await bus.tasks.lease(1)
        await l.hand_back()
        t = time.time()
        l = await bus.tasks.lease(1)
        l2 = await bus.tasks.lease(1)
        print(l.task.id, l2.task.id, l2.deliveries, time.time() - t)
        t = time.time()
        print(await bus.tasks.lease(0.3), time.time() - t)
        print([await l2.fail("bad", actor="x"), l2.task.id])
        await bus.plans.fence(e)
        await bus.plans.append(Done(epoch=e, step=1, metrics={"a": 1.0}))
        print([x async for x in bus.plans.scan()])
        async with Heartbeat(bus, LiveRow(role="actor", id="a", host="h", pid=1, phase="working")) as hb:
            v = LiveView(bus)
            await asyncio.sleep(0.05)
            print(await v.refresh())
        print(await v.refresh())
        print(
            [x.seq async for x in bus.samples.tail(last=3, follow=False)],
            [x async for x in bus.samples.tail(last=1, follow=False, headers_only=True)],
        )
