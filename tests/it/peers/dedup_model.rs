//! I9 against a model: two brokers push overlapping ids to few partitions at once, while windows change, time passes,
//! hashes are purged, segments are deleted and brokers start anew. The model knows every stored occurrence and its commit
//! time, and so exactly which push must be `queued` and which `duplicate`; of those that race for one id exactly one wins.
//!
//! `REGENT_IT_SEED=<seed>` repeats a history, `REGENT_DEDUP_HISTORIES=<n>` runs more.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use regent::ids::TransactionHash;
use serde_json::json;

use crate::harness::{Broker, Client, Database, PATIENCE, PushResult, eventually, number};

const PARTITIONS: usize = 2;
/// Few ids, so that most pushes meet another.
const IDS: usize = 10;
const STEPS: usize = 22;
/// No step may decide by seconds of real time: ages and windows are multiples of this, and a history is far shorter.
const GRAIN: i64 = 600;

/// One push of one racer: ids for one partition, in body order.
#[derive(Clone, Debug)]
struct Push {
    partition: usize,
    ids: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Step {
    /// These go out at once, the odd ones over the second broker.
    Push(Vec<Push>),
    /// `dedupWindowSeconds`, in grains.
    Window(i64),
    /// Everything grows older by so many grains; hashes past their windows go, and segments if retention is on.
    Age(i64),
    /// A broker starts anew; with it, what it remembers.
    Restart(usize),
}

/// What was answered for one item: whether it was stored, its offset and its id.
#[derive(Clone, Debug)]
struct Told {
    is_queued: bool,
    offset: i64,
    message: String,
}

#[derive(Clone, Debug)]
struct Stored {
    id: usize,
    /// Grains since its commit.
    age: i64,
    message: String,
    /// Its hash was purged: it is no original any more.
    is_forgotten: bool,
}

/// What must be stored.
#[derive(Clone, Debug, Default)]
struct Model {
    window: i64,
    logs: [Vec<Stored>; PARTITIONS],
    /// Age in grains from which segments go; 0 = never.
    retention: i64,
}

/// Why answers cannot be right.
#[derive(Debug, PartialEq)]
struct Wrong(String);

impl Model {
    /// The earliest stored occurrence inside the window. What is exactly as old as the window is outside: a moment has
    /// passed since.
    fn original(&self, partition: usize, id: usize) -> Option<(i64, &Stored)> {
        let log = (0..).zip(&self.logs[partition]);
        log.into_iter().find(|(_, stored)| stored.id == id && stored.age < self.window && !stored.is_forgotten)
    }

    /// What retention does when it looks: hashes go at `max(dedupWindowSeconds, 900)`, segments by their own rule.
    fn sweep(&mut self) {
        let kept = (self.window * GRAIN).max(900);
        for stored in self.logs.iter_mut().flatten() {
            stored.is_forgotten |= stored.age * GRAIN >= kept;
            if self.retention > 0 && stored.age >= self.retention {
                stored.message = uuid::Uuid::nil().to_string();
            }
        }
    }

    /// Takes the answers of pushes that ran at once, or says what is wrong with them.
    fn take(&mut self, pushes: &[Push], answers: &[Vec<Told>]) -> Result<(), Wrong> {
        let wrong = |text: String| Err(Wrong(text));
        for partition in 0..PARTITIONS {
            let mut new: BTreeMap<i64, (usize, String)> = BTreeMap::new();
            let told = pushes.iter().zip(answers).filter(|(push, _)| push.partition == partition);
            let told: Vec<(usize, usize, &Told)> = told
                .enumerate()
                .flat_map(|(n, (push, told))| push.ids.iter().zip(told).map(move |(id, told)| (n, *id, told)))
                .collect();
            let length = self.logs[partition].len() as i64;
            for (_, id, told) in told.iter().filter(|(.., told)| told.is_queued) {
                if self.window > 0 && self.original(partition, *id).is_some() {
                    return wrong(format!("id {id} of partition {partition} was stored twice within its window"));
                }
                if told.offset < length || new.insert(told.offset, (*id, told.message.clone())).is_some() {
                    return wrong(format!("offset {} of partition {partition} was given twice", told.offset));
                }
            }
            if !new.keys().copied().eq(length..length + new.len() as i64) {
                return wrong(format!("offsets of partition {partition} have a gap: {new:?}"));
            }
            for (racer, id, told) in &told {
                // Of each racer's copies of an id only the first can be stored, whatever the window.
                let queued: Vec<i64> =
                    new.iter().filter(|(_, (new, _))| new == id).map(|(offset, _)| *offset).collect();
                if told.is_queued {
                    continue;
                }
                let old = self.original(partition, *id).filter(|_| self.window > 0);
                let (offset, message) = match (old, queued.first()) {
                    (Some((offset, stored)), _) => (offset, &stored.message),
                    (None, Some(first)) if self.window > 0 => (*first, &new[first].1),
                    // Without a window a duplicate is one of its own body.
                    (None, Some(_)) if new.get(&told.offset).is_some_and(|(new, _)| new == id) => {
                        (told.offset, &new[&told.offset].1)
                    }
                    _ => return wrong(format!("id {id} of partition {partition} (racer {racer}): a false duplicate")),
                };
                if told.offset != offset || told.message != *message {
                    return wrong(format!("id {id} of partition {partition}: not the original {offset}: {told:?}"));
                }
            }
            let mut by_id: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
            for (_, id, told) in &told {
                let (all, queued) = by_id.entry(*id).or_default();
                (*all, *queued) = (*all + 1, *queued + usize::from(told.is_queued));
            }
            if let Some((id, _)) = by_id.iter().find(|(_, (_, queued))| self.window > 0 && *queued > 1) {
                return wrong(format!("id {id} of partition {partition} was stored by two racers"));
            }
            self.logs[partition].extend(new.into_values().map(|(id, message)| Stored {
                id,
                age: 0,
                message,
                is_forgotten: false,
            }));
        }
        Ok(())
    }

    fn age(&mut self, grains: i64) {
        self.logs.iter_mut().flatten().for_each(|stored| stored.age += grains);
    }
}

fn draw(rng: &mut StdRng) -> Step {
    match rng.random_range(0..100) {
        0..68 => {
            let racers = rng.random_range(1..=5);
            let push = |rng: &mut StdRng| Push {
                partition: rng.random_range(0..PARTITIONS),
                ids: (0..rng.random_range(1..5)).map(|_| rng.random_range(0..IDS)).collect(),
            };
            Step::Push((0..racers).map(|_| push(rng)).collect())
        }
        68..80 => Step::Window([0, 1, 2, 3, 6][rng.random_range(0..5)]),
        80..94 => Step::Age(rng.random_range(1..3)),
        _ => Step::Restart(rng.random_range(0..2)),
    }
}

/// One history on a queue of its own.
struct History<'a> {
    seed: u64,
    db: &'a Database,
    queue: String,
    steps: Vec<Step>,
    model: Model,
    story: Story,
}

/// Steps with the answers to their pushes.
type Story = Vec<(Step, Vec<Vec<Told>>)>;

fn retention_of(seed: u64) -> i64 {
    if seed.is_multiple_of(2) { 4 } else { 0 }
}

impl<'a> History<'a> {
    fn new(seed: u64, db: &'a Database) -> History<'a> {
        let mut rng = StdRng::seed_from_u64(seed);
        let window = rng.random_range(1..4);
        let mut steps = vec![Step::Window(window)];
        steps.extend((0..STEPS).map(|_| draw(&mut rng)));
        let model = Model { window, retention: retention_of(seed), ..Model::default() };
        History { seed, db, queue: format!("q{seed}"), steps, model, story: Vec::new() }
    }

    /// Carries out step `n` and judges it. Answers the broker that must start anew.
    async fn take(&mut self, n: usize, brokers: &[Client; 2]) -> Option<usize> {
        let step = self.steps[n].clone();
        let mut answers = Vec::new();
        let mut restart = None;
        match &step {
            Step::Push(pushes) => {
                let all = pushes.iter().enumerate().map(|(nth, push)| self.push(&brokers[nth % 2], push));
                answers = join_all(all).await;
                if let Err(wrong) = self.model.take(pushes, &answers) {
                    let (seed, story) = (self.seed, &self.story);
                    panic!("REGENT_IT_SEED={seed}, step {n}: {wrong:?}\n{pushes:?}\n{answers:?}\nafter {story:#?}");
                }
            }
            Step::Window(window) => {
                self.model.window = *window;
                let options = json!({ "dedupWindowSeconds": window * GRAIN, "retentionSeconds": self.model.retention * GRAIN,
                    "retentionEnabled": self.model.retention > 0 });
                // The answering broker obeys at once, the other within a second: both are told, so the verdict is sharp.
                for broker in brokers {
                    broker.configure(&self.queue, options.clone()).await;
                }
                self.pass(0).await;
            }
            Step::Age(grains) => self.pass(*grains).await,
            Step::Restart(which) => restart = Some(*which),
        }
        self.story.push((step, answers));
        restart
    }

    /// Time passes, and retention looks.
    async fn pass(&mut self, grains: i64) {
        self.db.age_queue(&self.queue, (grains * GRAIN) as i32).await;
        eventually(PATIENCE, || self.db.is_queue_swept(&self.queue)).await;
        self.model.age(grains);
        self.model.sweep();
    }

    async fn push(&self, broker: &Client, push: &Push) -> Vec<Told> {
        let partition = format!("p{}", push.partition);
        let item = |id: &usize| json!({ "queue": self.queue, "partition": partition, "transactionId": format!("t{id}"), "payload": id });
        let told = |result: PushResult| {
            assert!(matches!(result.status.as_str(), "queued" | "duplicate"), "{result:?}");
            let offset = result.offset.expect("an offset");
            Told { is_queued: result.status == "queued", offset, message: result.message_id }
        };
        broker.push(push.ids.iter().map(item).collect()).await.into_iter().map(told).collect()
    }

    /// The rows agree with the model.
    async fn ends(&self) {
        for (partition, log) in self.model.logs.iter().enumerate() {
            let last = self.db.last_offset(&self.queue, &format!("p{partition}")).await;
            assert_eq!(last.unwrap_or(-1), log.len() as i64 - 1, "REGENT_IT_SEED={}", self.seed);
            let stored: Vec<(i64, Vec<u8>)> = self
                .hashes(partition)
                .await
                .into_iter()
                .flat_map(|(base, hashes)| (base..).zip(hashes.chunks(16).map(<[u8]>::to_vec).collect::<Vec<_>>()))
                .collect();
            let wanted: Vec<(i64, Vec<u8>)> = (0..)
                .zip(log)
                .filter(|(_, stored)| !stored.is_forgotten)
                .map(|(offset, stored)| (offset, TransactionHash::of(&format!("t{}", stored.id)).to_bytes().to_vec()))
                .collect();
            assert_eq!(stored, wanted, "REGENT_IT_SEED={}: hashes of partition {partition}", self.seed);
        }
    }

    /// The ids that are stored from an offset on, by their hashes.
    async fn hashes(&self, partition: usize) -> Vec<(i64, Vec<u8>)> {
        sqlx::query_as(
            "SELECT t.base_offset, t.hashes FROM queen.log_txns t JOIN queen.log_partitions p ON p.id = t.partition_id
               JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1 AND p.name = $2 ORDER BY t.base_offset",
        )
        .bind(&self.queue)
        .bind(format!("p{partition}"))
        .fetch_all(&self.db.pool)
        .await
        .unwrap()
    }
}

/// Histories in lockstep over two brokers, whose retention looks around all the time and which start anew where a history
/// says so.
async fn histories(count: u64) -> Vec<(u64, Story)> {
    let seeds: Vec<u64> = match number("REGENT_IT_SEED") {
        Some(seed) => vec![seed],
        None => {
            let first = rand::random_range(0..1_000_000_000);
            (first..first + count).collect()
        }
    };
    println!("seeds {seeds:?}");
    let db = Database::migrated().await;
    let sweeping = |config: &mut regent::config::Config| config.retention.interval_ms = 40;
    let mut brokers = [Broker::tuned(&db.url, sweeping).await, Broker::tuned(&db.url, sweeping).await];
    let mut stories = Vec::new();
    for some in seeds.chunks(8) {
        let mut histories: Vec<History> = some.iter().map(|seed| History::new(*seed, &db)).collect();
        for n in 0..=STEPS {
            let clients = [(*brokers[0]).clone(), (*brokers[1]).clone()];
            let taken = join_all(histories.iter_mut().map(|history| history.take(n, &clients))).await;
            // In lockstep with others a history sees more new starts than it asks for.
            for which in taken.into_iter().flatten().collect::<BTreeSet<usize>>() {
                let fresh = Broker::tuned(&db.url, sweeping).await;
                std::mem::replace(&mut brokers[which], fresh).stop().await;
            }
        }
        join_all(histories.iter().map(History::ends)).await;
        stories.extend(histories.into_iter().map(|history| (history.seed, history.story)));
    }
    stories
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verdicts_of_two_brokers_are_those_of_the_model() {
    let stories = histories(number("REGENT_DEDUP_HISTORIES").unwrap_or(16)).await;
    let told = stories.iter().flat_map(|(_, story)| story.iter().flat_map(|(_, answers)| answers.iter().flatten()));
    let (mut queued, mut duplicate) = (0, 0);
    told.for_each(|told| *(if told.is_queued { &mut queued } else { &mut duplicate }) += 1);
    println!("{queued} queued, {duplicate} duplicate");
    assert!(queued > 0 && duplicate > 0, "histories without a verdict prove nothing");
    // The checker can fail: one altered answer, and it says so.
    for (seed, story) in stories {
        assert_eq!(replay(&story, retention_of(seed)), Ok(()));
        let mut rng = StdRng::seed_from_u64(seed ^ 1);
        let places: Vec<(usize, usize, usize)> = story
            .iter()
            .enumerate()
            .flat_map(|(n, (_, answers))| {
                answers.iter().enumerate().flat_map(move |(racer, told)| (0..told.len()).map(move |at| (n, racer, at)))
            })
            .collect();
        if places.is_empty() {
            continue;
        }
        let (n, racer, at) = places[rng.random_range(0..places.len())];
        let mut altered = story.clone();
        let told = &mut altered[n].1[racer][at];
        match rng.random_range(0..3) {
            0 => told.is_queued = !told.is_queued,
            // The id of what was stored is only known from its own answer.
            1 if !told.is_queued => told.message = uuid::Uuid::new_v4().to_string(),
            _ => told.offset += 1,
        }
        let verdict = replay(&altered, retention_of(seed));
        assert!(verdict.is_err(), "REGENT_IT_SEED={seed}: step {n} was altered to {:?} and passed", altered[n]);
    }
}

/// Judges a history from its answers alone.
fn replay(story: &Story, retention: i64) -> Result<(), Wrong> {
    let mut model = Model { retention, ..Model::default() };
    for (step, answers) in story {
        match step {
            Step::Push(pushes) => model.take(pushes, answers)?,
            Step::Window(window) => {
                model.window = *window;
                model.sweep();
            }
            Step::Age(grains) => {
                model.age(*grains);
                model.sweep();
            }
            Step::Restart(_) => {}
        }
    }
    Ok(())
}
