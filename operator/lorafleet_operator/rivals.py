"""When a fenced operator may end, and with that be started again. Caller: `app`. It reads, and writes nothing.

another holds our Lease ─▶ now: started again, this one stands by
nobody renews it, and no newer operator speaks to our runtimes ─▶ now: started again, this one is alone
else ─▶ the other one lives, without a Lease of its own that this one could see: wait
"""

import asyncio

from lorafleet_operator.kube.lease import Lease
from lorafleet_operator.pool.links import Links


async def wait_until_alone(lease: Lease, links: Links, seconds: float) -> None:
    """Waits for `seconds`, the lease's duration, and then as long as another operator would be fenced by a restart.

    Args:
        lease: given up already.
        links: closed already.
        seconds: between two looks.
    """
    before = await lease.look()
    while True:
        await asyncio.sleep(seconds)
        found = await lease.look()
        if found is not None:
            holder, _ = found
            if holder or (found == before and await links.rivals_silent()):
                return
        before = found
