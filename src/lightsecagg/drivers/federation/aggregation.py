"""From the table [aggregation] to the `Settings` of the protocol."""

from __future__ import annotations

from lightsecagg.drivers.federation.jobs import ServerJob
from lightsecagg.drivers.federation.tables import AggregationTable
from lightsecagg.params import Parameters, survivors_of_fewer
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.protocol.settings import Settings


def make_settings(
    table: AggregationTable,
    job: ServerJob,
    session: bytes,
    allow_list: AllowList,
    buffering: Buffering | None = None,
) -> Settings:
    """What a configuration asks for, but for the number and the model of a round.

    N is the most that a round takes: no more than there are members. T and D stay what they are,
    and U shrinks with N.
    SecAgg's U is its threshold t, by default the smallest that its threat model allows; SecAgg+'s
    t and degree k are found from N, T and D.
    """
    traits = traits_of(table.protocol)
    clients = min(table.clients, len(allow_list))
    fewer = survivors_of_fewer(table.survivors, table.privacy, table.clients - clients)
    parameters = Parameters(
        clients=clients,
        privacy=table.privacy,
        dropouts=table.dropouts,
        survivors=0 if traits.has_threshold else fewer,
        threat_model=table.threat_model,
        share_mode=table.share_mode,
        modulus=table.modulus,
    )
    threshold = table.survivors if traits.has_threshold else 0
    neighbours = table.neighbours if traits.ring else 0
    parameters, neighbours, threshold = traits.resolve(parameters, neighbours, threshold)
    quantizer = make_quantizer(
        parameters,
        job.dimension,
        table.bound,
        max_samples=table.max_samples if job.weighted else 1,
        weighted=job.weighted,
        buffering=buffering,
        decoding=table.decoding,
        group=traits.group(parameters),
    )
    return Settings(
        protocol=traits.name,
        parameters=parameters,
        quantizer=quantizer,
        dimension=job.dimension,
        session=session,
        round=0,
        allow_list=allow_list.digest,
        neighbours=neighbours,
        buffering=buffering,
        threshold=threshold,
    )
