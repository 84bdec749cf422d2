//! Metrics of single queues: of those that the operator names, and of the busiest few. At most [`WATCHED_MAX`] names in the
//! life of the process, so the label cannot grow without bound; every other queue counts under [`OTHERS`].

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use dashmap::DashMap;
use metrics::{Counter, counter, gauge};
use metrics_exporter_prometheus::PrometheusBuilder;

use super::Broker;
use super::error::BrokerResult;
use crate::ids::{GroupId, QueueId};
use crate::metrics::{self as names, ALL, OTHER_QUEUES as OTHERS};
use crate::store::Store;
use crate::store::watched_queues::{MINUTES_MAX, WatchedMinute, WatchedSnapshot};

/// Most queues with series of their own.
pub const WATCHED_MAX: usize = 100;
/// Groups whose queue is remembered.
const GROUPS_MAX: usize = 20_000;

/// See the fields.
#[derive(Clone, Debug, Default)]
pub struct WatchSettings {
    /// Queues by name; those past [`WATCHED_MAX`] are left out.
    pub names: Vec<String>,
    /// How many of the busiest queues of a minute are watched from then on.
    pub busiest: usize,
    /// Pause between two looks at what PostgreSQL knows of them.
    pub interval: Duration,
}

/// Counters of one queue on this broker.
#[derive(Clone, Debug)]
struct Counters {
    pushed: Counter,
    popped: Counter,
    acked: Counter,
    refused: Counter,
}

impl Counters {
    fn of(queue: &str) -> Arc<Counters> {
        let acked = |result| counter!(names::QUEUE_ACKED, "queue" => queue.to_owned(), "result" => result);
        Arc::new(Counters {
            pushed: counter!(names::QUEUE_PUSHED, "queue" => queue.to_owned()),
            popped: counter!(names::QUEUE_POPPED, "queue" => queue.to_owned()),
            acked: acked("success"),
            refused: acked("failure"),
        })
    }
}

/// What PostgreSQL said at the last look.
#[derive(Clone, Debug, Default)]
struct Looked {
    at: Option<Instant>,
    snapshots: Vec<WatchedSnapshot>,
    minutes: Vec<WatchedMinute>,
}

/// See the module.
#[derive(Debug)]
pub struct WatchedQueues {
    settings: WatchSettings,
    /// Those of the names that exist.
    queues: ArcSwap<HashMap<QueueId, Arc<Counters>>>,
    /// Groups of them.
    groups: DashMap<GroupId, Arc<Counters>>,
    others: Arc<Counters>,
    names: Mutex<BTreeMap<String, Arc<Counters>>>,
    /// The busiest queues of the last minute.
    busiest: Mutex<Vec<QueueId>>,
    looked: Mutex<Looked>,
}

impl Default for WatchedQueues {
    fn default() -> WatchedQueues {
        WatchedQueues::new(WatchSettings::default())
    }
}

impl WatchedQueues {
    /// Counters of every name at zero.
    pub fn new(settings: WatchSettings) -> WatchedQueues {
        let names = settings.names.iter().take(WATCHED_MAX);
        WatchedQueues {
            names: Mutex::new(names.map(|name| (name.clone(), Counters::of(name))).collect()),
            settings,
            queues: ArcSwap::default(),
            groups: DashMap::new(),
            others: Counters::of(OTHERS),
            busiest: Mutex::default(),
            looked: Mutex::default(),
        }
    }

    /// Messages were stored in a queue.
    pub fn pushed(&self, queue: QueueId, messages: u64) {
        self.queues.load().get(&queue).unwrap_or(&self.others).pushed.increment(messages);
    }

    /// Messages of a queue were delivered to a group.
    pub fn popped(&self, queue: QueueId, group: GroupId, messages: u64) {
        let queues = self.queues.load();
        let Some(counters) = queues.get(&queue) else { return self.others.popped.increment(messages) };
        counters.popped.increment(messages);
        // The group of a first delivery: its acks come before the next look.
        if !self.groups.contains_key(&group) && self.groups.len() < GROUPS_MAX {
            self.groups.insert(group, counters.clone());
        }
    }

    /// Items of an ack call were settled for a group.
    pub fn acked(&self, group: GroupId, success: u64, failed: u64) {
        let watched = if self.groups.is_empty() { None } else { self.groups.get(&group) };
        let counters = watched.as_deref().unwrap_or(&self.others);
        counters.acked.increment(success);
        counters.refused.increment(failed);
    }

    /// How busy queues were within the last minute.
    pub fn note_minute(&self, queues: impl Iterator<Item = (QueueId, i64)>) {
        if self.settings.busiest == 0 {
            return;
        }
        let mut queues: Vec<_> = queues.filter(|(queue, busy)| queue.0 != 0 && *busy > 0).collect();
        queues.sort_unstable_by_key(|(queue, busy)| (std::cmp::Reverse(*busy), *queue));
        queues.truncate(self.settings.busiest);
        *locked(&self.busiest) = queues.into_iter().map(|(queue, _)| queue).collect();
    }

    /// Pause between two looks.
    pub fn interval(&self) -> Duration {
        self.settings.interval
    }

    /// Asks PostgreSQL about the watched queues, and how many dead letters there are in all.
    pub async fn look(&self, store: &Store) -> BrokerResult<()> {
        gauge!(names::DLQ_DEPTH, "scope" => "cluster").set(store.dead_letter_depth().await? as f64);
        let busiest = std::mem::take(&mut *locked(&self.busiest));
        if !busiest.is_empty() {
            self.adopt(store.queue_names(&busiest).await?);
        }
        let wanted: Vec<String> = locked(&self.names).keys().cloned().collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let snapshots = store.watched_snapshots(&wanted).await?;
        let queues: HashMap<QueueId, Arc<Counters>> = {
            let names = locked(&self.names);
            let of = |s: &WatchedSnapshot| Some((QueueId(s.queue_id), names.get(&s.name)?.clone()));
            snapshots.iter().filter_map(of).collect()
        };
        let ids: Vec<QueueId> = queues.keys().copied().collect();
        self.queues.store(Arc::new(queues.clone()));
        let minutes = store.watched_minutes(&ids).await?;
        let groups: HashMap<GroupId, QueueId> =
            store.watched_groups(&ids).await?.into_iter().take(GROUPS_MAX).collect();
        self.groups.retain(|group, _| groups.contains_key(group));
        for (group, queue) in groups {
            if let Some(counters) = queues.get(&queue) {
                self.groups.insert(group, counters.clone());
            }
        }
        *locked(&self.looked) = Looked { at: Some(Instant::now()), snapshots, minutes };
        Ok(())
    }

    /// Watches these as well, as long as there is room.
    fn adopt(&self, found: Vec<String>) {
        let mut names = locked(&self.names);
        for name in found {
            if names.len() < WATCHED_MAX && !names.contains_key(&name) {
                let counters = Counters::of(&name);
                names.insert(name, counters);
            }
        }
    }

    /// The gauges of the watched queues as Prometheus exposition. Series of queues that are gone, and of minutes that are
    /// too old, are not among them: a recorder of its own is made for each scrape.
    fn render(&self, parked: &HashMap<QueueId, usize>) -> String {
        let looked = locked(&self.looked).clone();
        let Some(since) = looked.at.map(|at| at.elapsed().as_secs_f64()) else { return String::new() };
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            for metric in ALL.iter().filter(|metric| metric.labels.contains(&names::PER_QUEUE)) {
                metrics::describe_gauge!(metric.name, metric.help);
            }
            for snapshot in &looked.snapshots {
                show_snapshot(snapshot, parked.get(&QueueId(snapshot.queue_id)).copied().unwrap_or(0), since);
            }
            let named = |minute: &WatchedMinute| looked.snapshots.iter().find(|s| s.queue_id == minute.queue_id);
            for minute in &looked.minutes {
                let fresh = minute.age + since < f64::from(MINUTES_MAX) * 60.0;
                if let Some(snapshot) = named(minute).filter(|_| fresh) {
                    show_minute(&snapshot.name, minute, since);
                }
            }
        });
        recorder.handle().render()
    }
}

fn show_snapshot(snapshot: &WatchedSnapshot, parked: usize, since: f64) {
    let show = |name: &'static str, value: f64| gauge!(name, "queue" => snapshot.name.clone()).set(value);
    show(names::QUEUE_RETAINED, snapshot.retained as f64);
    show(names::QUEUE_PENDING, snapshot.pending as f64);
    show(names::QUEUE_LEASED, snapshot.leased as f64);
    let age = if snapshot.pending > 0 { snapshot.oldest_pending_age + since } else { 0.0 };
    show(names::QUEUE_OLDEST_AGE, age);
    show(names::DLQ_DEPTH_BY_QUEUE, snapshot.dead_letters as f64);
    show(names::QUEUE_PARKED, parked as f64);
    if let Some(age) = snapshot.age {
        show(names::QUEUE_SNAPSHOT_AGE, age + since);
    }
}

fn show_minute(queue: &str, minute: &WatchedMinute, since: f64) {
    let show = |name: &'static str, value: f64| gauge!(name, "queue" => queue.to_owned()).set(value);
    show(names::QUEUE_PUSH_MESSAGES_PER_MINUTE, minute.push_messages as f64);
    show(names::QUEUE_PUSH_REQUESTS_PER_MINUTE, minute.push_requests as f64);
    show(names::QUEUE_POP_MESSAGES_PER_MINUTE, minute.pop_messages as f64);
    show(names::QUEUE_POP_EMPTY_PER_MINUTE, minute.pop_empty as f64);
    show(names::QUEUE_CONFLATED_PER_MINUTE, minute.conflated as f64);
    show(names::QUEUE_TRANSACTIONS_PER_MINUTE, minute.transactions as f64);
    show(names::QUEUE_PARKED_CONSUMERS, minute.parked);
    show(names::QUEUE_METRICS_AGE, minute.age + since);
    let labelled = |name: &'static str, key: &'static str, text: &'static str, value: f64| {
        gauge!(name, "queue" => queue.to_owned(), key => text).set(value);
    };
    labelled(names::QUEUE_ACK_PER_MINUTE, "result", "success", minute.ack_success as f64);
    labelled(names::QUEUE_ACK_PER_MINUTE, "result", "failed", minute.ack_failed as f64);
    labelled(names::QUEUE_POP_LAG, "stat", "avg", minute.lag_ms_avg);
    labelled(names::QUEUE_POP_LAG, "stat", "max", minute.lag_ms_max as f64);
}

impl Broker {
    /// The watched queues, for the background task that looks at them.
    pub fn watched_queues(&self) -> &WatchedQueues {
        self.activity.watched()
    }

    /// One look of that task.
    pub async fn look_at_watched_queues(&self) -> BrokerResult<()> {
        self.watched_queues().look(&self.store).await
    }

    /// The gauges of single queues as Prometheus exposition.
    pub fn watched_queues_exposition(&self) -> String {
        let watched = self.watched_queues();
        if locked(&watched.looked).at.is_none() {
            return String::new();
        }
        watched.render(&self.ready.parked_by_queue())
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watching(busiest: usize) -> WatchedQueues {
        WatchedQueues::new(WatchSettings { names: vec!["a".into()], busiest, interval: Duration::from_secs(1) })
    }

    #[test]
    fn names_are_bounded_for_the_life_of_the_process() {
        let watched = watching(50);
        for round in 0..50 {
            watched.adopt((0..50).map(|n| format!("queue {round}-{n}")).collect());
        }
        assert_eq!(locked(&watched.names).len(), WATCHED_MAX);
        assert!(locked(&watched.names).contains_key("a"), "what the operator named stays");
        let many = WatchSettings { names: (0..500).map(|n| n.to_string()).collect(), ..WatchSettings::default() };
        assert_eq!(locked(&WatchedQueues::new(many).names).len(), WATCHED_MAX);
    }

    #[test]
    fn only_the_busiest_of_a_minute_are_offered_and_none_when_that_is_off() {
        let minute = || (0..10).map(|n| (QueueId(n), i64::from(n % 7)));
        let watched = watching(3);
        watched.note_minute(minute());
        assert_eq!(*locked(&watched.busiest), [QueueId(6), QueueId(5), QueueId(4)]);
        let off = watching(0);
        off.note_minute(minute());
        assert!(locked(&off.busiest).is_empty());
    }

    #[test]
    fn series_of_old_minutes_and_of_queues_that_are_gone_leave() {
        let watched = watching(0);
        assert_eq!(watched.render(&HashMap::new()), "");
        let snapshot = |queue_id, name: &str| WatchedSnapshot { queue_id, name: name.into(), ..Default::default() };
        let minute = |queue_id, age| WatchedMinute { queue_id, age, push_messages: 5, ..Default::default() };
        *locked(&watched.looked) = Looked {
            at: Some(Instant::now()),
            snapshots: vec![snapshot(1, "new"), snapshot(2, "old\"\\")],
            minutes: vec![minute(1, 70.0), minute(2, 301.0), minute(3, 10.0)],
        };
        let text = watched.render(&HashMap::from([(QueueId(1), 4)]));
        assert!(text.contains("# HELP regent_queue_pending_messages "), "{text}");
        assert!(text.contains("regent_queue_parked_pops{queue=\"new\"} 4"), "{text}");
        assert!(text.contains("regent_queue_parked_pops{queue=\"old\\\"\\\\\"} 0"), "{text}");
        assert!(text.contains("queen_queue_push_messages_per_minute{queue=\"new\"} 5"), "{text}");
        assert_eq!(text.matches("\nqueen_queue_push_messages_per_minute{").count(), 1, "{text}");
    }
}
