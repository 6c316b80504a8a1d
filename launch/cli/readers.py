"""``tidemill cursors``: lists the registered readers of a run, and removes one that will not return."""

from rich.console import Console

from bus.errors import BusError
from bus.streams.bus import connect
from bus.streams.cursors import WAIT, Cursors

CONNECT_S = 3.0


async def show_cursors(url: str, run: str, *, forget: str) -> int:
    """List the registered readers, after removing ``forget`` if it is given; return 0. Raises ValueError."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        async with connect(url, run, name="cursors", wait_s=CONNECT_S) as bus:
            if forget:
                await Cursors(bus).drop(forget)
                console.print(f"{forget}: forgotten")
            state, places = await bus.samples.info(), await Cursors(bus).all()
    except BusError as error:
        raise ValueError(str(error)) from None
    for name, place in places.items():
        if place.created != state.created:
            kept = "of an earlier stream, which is gone"
        elif place.given_up:
            kept = "given up: the stream was too full to wait for it"
        else:
            kept = "trimming waits for it" if place.policy == WAIT else "trimming does not wait for it"
        console.print(
            f"{name}: at {place.floor}, {max(0, state.last_seq - place.floor)} messages behind; {kept}; read by {place.owner}", markup=False
        )
    if not places:
        console.print("no reader is registered; the learner's own position is in its checkpoint")
    return 0
