//! Random histories on three brokers-with-database at once: everything on, fusion off, one at a time with neither.
//! After every step answers and rows must be the same (I6), and the cursors must obey the model of `ack_decision`.
//!
//! In each world a second broker without any registry works on the same store: what it does, the first one cannot see.
//! `REGENT_HISTORIES` sets how many are run (default 400).

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::fake::{Flaw, Options, World};
use super::*;
use crate::broker::ack_decision::Signal;

const PARTITIONS: i64 = 2;
const GROUPS: [&str; 2] = ["g1", "g2"];

#[derive(Clone, Debug)]
enum Op {
    Push { partition: i64, ids: Vec<u8> },
    Pop { partition: i64, group: usize, batch: i64, known: bool },
    Ack { group: usize, leases: Vec<LeaseRef>, known: bool, picks: Vec<Pick> },
    Extend { lease: usize },
    Wait { ms: i64 },
    Seek { partition: i64, group: usize, to: i64 },
    Purge { partition: i64, to: i64 },
    Retain { partition: i64, to: i64 },
}

/// Which lease an ack speaks about, and whether it says so.
#[derive(Clone, Copy, Debug)]
struct LeaseRef {
    nth_last: usize,
    claim: u8,
}

/// Which messages of those leases it names.
#[derive(Clone, Debug)]
enum Pick {
    /// Everything delivered, as completed: what the fast path is for.
    Whole,
    /// One message of the batch, with a status.
    One(usize, u8),
    /// Any id.
    Id(u8, u8),
}

#[derive(Clone, Debug)]
struct Lease {
    partition: i64,
    worker: LeaseId,
    ids: Vec<String>,
}

fn status(kind: u8) -> AckStatus {
    match kind % 8 {
        0 => AckStatus::Signal(Signal::Retry),
        1 => AckStatus::Signal(Signal::Failed),
        2 => AckStatus::Signal(Signal::Dlq),
        _ => AckStatus::Completed,
    }
}

fn op() -> impl Strategy<Value = Op> {
    let partition = 0..PARTITIONS;
    // Mostly the latest lease of the group, named as it should be, and acked whole or message by message.
    let nth_last = prop_oneof![6 => Just(0usize), 2 => Just(1), 1 => 2usize..5];
    let lease = (nth_last, 0u8..16).prop_map(|(nth_last, claim)| LeaseRef { nth_last, claim });
    let leases = prop_oneof![4 => prop::collection::vec(lease.clone(), 1), 1 => prop::collection::vec(lease, 2)];
    let pick = prop_oneof![
        1 => Just(Pick::Whole),
        6 => (0usize..8, any::<u8>()).prop_map(|(nth, kind)| Pick::One(nth, kind)),
        1 => (0u8..40, any::<u8>()).prop_map(|(id, kind)| Pick::Id(id, kind)),
    ];
    let picks = prop_oneof![2 => Just(vec![Pick::Whole]), 3 => prop::collection::vec(pick, 1..4)];
    prop_oneof![
        3 => (partition.clone(), prop::collection::vec(0u8..40, 1..6)).prop_map(|(partition, ids)| Op::Push { partition, ids }),
        6 => (partition.clone(), 0usize..2, 1i64..7, prop::bool::weighted(0.8))
            .prop_map(|(partition, group, batch, known)| Op::Pop { partition, group, batch, known }),
        10 => (0usize..2, leases, prop::bool::weighted(0.7), picks)
            .prop_map(|(group, leases, known, picks)| Op::Ack { group, leases, known, picks }),
        1 => (0usize..3).prop_map(|lease| Op::Extend { lease }),
        2 => prop_oneof![Just(10i64), Just(60), Just(150)].prop_map(|ms| Op::Wait { ms }),
        1 => (partition.clone(), 0usize..2, -1i64..12).prop_map(|(partition, group, to)| Op::Seek { partition, group, to }),
        1 => (partition.clone(), 0i64..12).prop_map(|(partition, to)| Op::Purge { partition, to }),
        1 => (partition, 0i64..12).prop_map(|(partition, to)| Op::Retain { partition, to }),
    ]
}

/// One database with two brokers.
struct Side {
    store: Arc<FakeStore>,
    broker: AckPipeline,
    peer: AckPipeline,
}

impl Side {
    fn new(settings: AckSettings, flaw: Option<Flaw>) -> Side {
        let store = Arc::new(FakeStore::new(flaw));
        let broker = pipeline(&store, settings).0;
        let peer = pipeline(&store, serial()).0;
        Side { store, broker, peer }
    }
}

/// A run of one history, on partitions of its own.
struct Run<'a> {
    sides: &'a [Side],
    first_partition: i64,
    leases: Vec<Vec<Lease>>,
    minted: u128,
}

impl Run<'_> {
    async fn step(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match op {
            Op::Push { partition, ids } => {
                let ids: Vec<String> = ids.iter().map(|id| format!("m{id}")).collect();
                for side in self.sides {
                    side.store.push(self.first_partition + partition, ids.clone());
                }
            }
            Op::Pop { partition, group, batch, known } => {
                self.pop(self.first_partition + partition, *group, *batch, *known)?
            }
            Op::Ack { group, leases, known, picks } => self.ack(*group, leases, *known, picks).await?,
            Op::Extend { lease } => {
                let all: Vec<Lease> = self.leases.iter().flatten().cloned().collect();
                let Some(lease) = all.iter().rev().nth(*lease) else { return Ok(()) };
                for side in self.sides {
                    if side.store.extend(lease.partition, lease.worker, 300) {
                        let until = Instant::now() + Duration::from_secs(120);
                        side.broker.extended(lease.worker, &[PartitionId(lease.partition)], until);
                    }
                }
            }
            Op::Wait { ms } => self.sides.iter().for_each(|side| side.store.world().now += ms),
            Op::Seek { partition, group, to } => {
                let partition = self.first_partition + partition;
                for side in self.sides {
                    side.store.seek(partition, group_id(GROUPS[*group]), *to);
                    side.broker.forget_lease(PartitionId(partition), GroupId(group_id(GROUPS[*group])));
                }
            }
            Op::Purge { partition, to } => self.each_log(*partition, |log| log.txns_start = log.txns_start.max(*to)),
            Op::Retain { partition, to } => {
                self.each_log(*partition, |log| log.log_start = (*to).min(log.next()).max(log.log_start));
            }
        }
        Ok(())
    }

    fn each_log(&self, partition: i64, change: impl Fn(&mut fake::Log)) {
        for side in self.sides {
            change(side.store.world().logs.get_mut(&(self.first_partition + partition)).unwrap());
        }
    }

    fn pop(&mut self, partition: i64, group: usize, batch: i64, known: bool) -> Result<(), TestCaseError> {
        self.minted += 1;
        let holder = worker(self.minted);
        let name = GROUPS[group];
        let mut claims = Vec::new();
        for side in self.sides {
            let claim = side.store.claim(partition, group_id(name), holder, batch, 100);
            if let (Some(claim), true) = (&claim, known) {
                side.broker.granted(grant(partition, name, holder, claim));
            }
            claims.push(claim);
        }
        prop_assert!(claims.windows(2).all(|pair| pair[0] == pair[1]), "claims differ: {claims:?}");
        if let Some((.., ids)) = claims.swap_remove(0) {
            self.leases[group].push(Lease { partition, worker: holder, ids });
        }
        Ok(())
    }

    async fn ack(&mut self, group: usize, refs: &[LeaseRef], known: bool, picks: &[Pick]) -> Result<(), TestCaseError> {
        let held = &self.leases[group];
        let mut items = Vec::new();
        for LeaseRef { nth_last, claim } in refs {
            let Some(lease) = held.iter().rev().nth(*nth_last) else { continue };
            let said = match claim {
                0 => LeaseClaim::Absent,
                1 => LeaseClaim::Foreign,
                2 => LeaseClaim::Id(worker(u128::MAX)),
                _ => LeaseClaim::Id(lease.worker),
            };
            for pick in picks {
                match pick {
                    Pick::Whole => {
                        items.extend(lease.ids.iter().map(|id| item(lease.partition, id, said, AckStatus::Completed)));
                    }
                    Pick::One(nth, kind) => {
                        let id = &lease.ids[nth % lease.ids.len()];
                        items.push(item(lease.partition, id, said, status(*kind)));
                    }
                    Pick::Id(id, kind) => items.push(item(lease.partition, &format!("m{id}"), said, status(*kind))),
                }
            }
        }
        for (nth, item) in items.iter_mut().enumerate() {
            item.reason = (nth % 3 == 0).then(|| format!("reason {nth}").into());
        }
        let mut told: Vec<Vec<AckAnswer>> = Vec::new();
        for side in self.sides {
            let broker = if known { &side.broker } else { &side.peer };
            told.push(broker.ack(GROUPS[group], items.clone()).await);
        }
        for other in &told[1..] {
            prop_assert_eq!(&told[0], other, "answers differ");
        }
        self.same_rows()
    }

    fn same_rows(&self) -> Result<(), TestCaseError> {
        let (first, end) = (self.first_partition, self.first_partition + PARTITIONS);
        let view = |world: &World| {
            let rows: Vec<_> =
                world.rows.range((first, i32::MIN)..(end, i32::MIN)).map(|(key, row)| (*key, row.clone())).collect();
            let letters: Vec<_> = world.letters.range(first..end).map(|(_, letters)| letters.clone()).collect();
            (rows, letters)
        };
        let views: Vec<_> = self.sides.iter().map(|side| view(&side.store.world())).collect();
        for other in &views[1..] {
            prop_assert_eq!(&views[0], other, "rows differ");
        }
        Ok(())
    }
}

fn histories() -> u32 {
    std::env::var("REGENT_HISTORIES").ok().and_then(|text| text.parse().ok()).unwrap_or(400)
}

/// Runs histories over these sides until one differs.
fn check(sides: &[Side], runtime: &tokio::runtime::Runtime, cases: u32, persist: bool) -> Result<(), String> {
    let config = Config {
        cases,
        failure_persistence: if persist { Config::default().failure_persistence } else { None },
        source_file: Some(file!()),
        ..Config::default()
    };
    let partitions = std::cell::Cell::new(0);
    let options = (0i32..3, prop::bool::ANY, prop::bool::weighted(0.7));
    let result = TestRunner::new(config).run(&(options, prop::collection::vec(op(), 1..50)), |(options, ops)| {
        let first_partition = partitions.get();
        partitions.set(first_partition + PARTITIONS);
        let (retry_limit, delay, dead_letters) = options;
        let options = Options { retry_limit, retry_delay_ms: if delay { 70 } else { 0 }, dead_letters };
        for side in sides {
            (0..PARTITIONS).for_each(|p| side.store.create(first_partition + p, options));
        }
        let mut run = Run { sides, first_partition, leases: vec![Vec::new(); GROUPS.len()], minted: 0 };
        runtime.block_on(async {
            for op in &ops {
                run.step(op).await?;
            }
            Ok(())
        })
    });
    result.map_err(|failure| failure.to_string())
}

#[test]
fn the_fast_path_never_changes_an_answer_or_a_row() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let sides = [Side::new(serial(), None), Side::new(positional(), None), Side::new(fused(), None)];
    if let Err(difference) = check(&sides, &runtime, histories(), true) {
        panic!("{difference}");
    }
    // The histories must have used what they compare.
    let advances = |side: &Side| side.store.world().advances.len();
    assert_eq!(advances(&sides[0]), 0);
    assert!(advances(&sides[1]) > 50 && advances(&sides[2]) > 50);
    for side in &sides {
        runtime.block_on(side.broker.shutdown());
    }
}

#[test]
fn a_flaw_in_the_fast_path_is_found() {
    let runtime = runtime();
    let _entered = runtime.enter();
    for flaw in [Flaw::CursorIgnored, Flaw::LapsedAccepted, Flaw::PurgeMissed] {
        let sides = [Side::new(serial(), None), Side::new(fused(), Some(flaw))];
        let found = check(&sides, &runtime, 3000, false);
        assert!(found.is_err(), "{flaw:?} went unnoticed");
    }
}
