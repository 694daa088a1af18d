"""LightSecAgg in Flower: a strategy that wraps another one, and a mod for the ClientApp.

    parcels      what travels in a Flower message
    agreed       what both sides know beforehand
    layout       an `ArrayRecord` as one vector, and back
    inner        which strategies can be wrapped, and what their replies look like
    grid         a Flower grid that is polled often, waits with an end, and forgets no message
    epoch        the server: one roster, its party, and a link to every node
    strategy     the wrapper: Flower's hooks, stage by stage
    node         what a node's operator configured, and what a node remembers
    mod          the client: one message in, one message out

`lightsecagg.flower` has the two names that users need; `docs/flower.md` says how they are used.
"""
