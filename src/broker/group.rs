//! Consumer groups: their keys, and where a new one starts (`spec/push-pop.md` §7.10).

use std::sync::Arc;

use chrono::{DateTime, NaiveDate, NaiveDateTime, Utc};
use dashmap::DashMap;
use futures_util::future::try_join_all;

use super::contact::{GroupContacts, Want};
use super::error::{BrokerError, BrokerResult};
use super::queue::Queue;
use super::settings::DefaultSubscription;
use crate::ids::{GroupId, QUEUE_MODE_GROUP, QueueId};
use crate::store::Store;
use crate::store::groups::{GroupRow, StartAt};

/// Cached groups before the cache is cleared as a whole.
const CACHED_GROUPS_MAX: usize = 500_000;

/// What a pop says about where its group starts; it counts at first contact only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subscription {
    /// `subscriptionMode`, if any was sent.
    pub mode: Option<String>,
    /// `subscriptionFrom`, if any was sent.
    pub from: Option<String>,
}

impl Subscription {
    /// The intent. Queue mode always begins at the oldest retained message.
    pub fn start(&self, group: &str, default: DefaultSubscription) -> StartAt {
        if group == QUEUE_MODE_GROUP {
            return StartAt::Beginning;
        }
        match self.from.as_deref() {
            Some("now") => return StartAt::End,
            Some(text) => {
                if let Some(at) = parse_timestamp(text) {
                    return StartAt::Timestamp(at);
                }
            }
            None => {}
        }
        match self.mode.as_deref() {
            // `new-only`: a legacy spelling that the any-other-word rule would turn into its opposite.
            Some("new" | "new-only") => StartAt::End,
            Some(_) => StartAt::Beginning,
            None => match default {
                DefaultSubscription::New => StartAt::End,
                DefaultSubscription::All => StartAt::Beginning,
            },
        }
    }
}

/// ISO-8601 with or without zone (none = UTC), or a date.
pub fn parse_timestamp(text: &str) -> Option<DateTime<Utc>> {
    let text = text.trim();
    if let Ok(at) = DateTime::parse_from_rfc3339(text) {
        return Some(at.to_utc());
    }
    for format in ["%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M"] {
        if let Ok(at) = NaiveDateTime::parse_from_str(text, format) {
            return Some(at.and_utc());
        }
    }
    for format in ["%Y-%m-%d %H:%M:%S%.f%#z", "%Y-%m-%dT%H:%M:%S%.f%#z"] {
        if let Ok(at) = DateTime::parse_from_str(text, format) {
            return Some(at.to_utc());
        }
    }
    NaiveDate::parse_from_str(text, "%Y-%m-%d").ok().and_then(|d| d.and_hms_opt(0, 0, 0)).map(|at| at.and_utc())
}

/// Group keys by queue and name.
#[derive(Clone, Debug)]
pub struct GroupDirectory {
    contacts: GroupContacts,
    rows: Arc<DashMap<(QueueId, String), GroupRow>>,
}

impl GroupDirectory {
    /// An empty cache over the store.
    pub fn new(store: &Store) -> GroupDirectory {
        GroupDirectory { contacts: GroupContacts::over(store), rows: Arc::default() }
    }

    /// First contact of a wildcard or discovery pop: the registered group. `None` if the queue is gone.
    pub async fn register(
        &self,
        queue: QueueId,
        name: &str,
        start: StartAt,
        conflation: bool,
    ) -> BrokerResult<Option<GroupRow>> {
        let key = (queue, name.to_owned());
        if let Some(row) = self.rows.get(&key).filter(|row| row.registered) {
            return Ok(Some(*row));
        }
        let row = Box::pin(self.contacts.meet(queue, name, Want::Registered(start, conflation))).await?;
        Ok(row.map(|row| self.remember(key, row)))
    }

    /// As [`GroupDirectory::register`] for many queues at once. Queues that are gone have no answer.
    pub async fn register_all(
        &self,
        queues: &[QueueId],
        name: &str,
        start: StartAt,
        conflation: bool,
    ) -> BrokerResult<Vec<(QueueId, GroupRow)>> {
        let meetings = queues.iter().map(async |queue| {
            let row = self.register(*queue, name, start, conflation).await?;
            Ok::<_, BrokerError>(row.map(|row| (*queue, row)))
        });
        Ok(try_join_all(meetings).await?.into_iter().flatten().collect())
    }

    /// The group of a targeted pop, registered or not. `None` if the queue is gone.
    pub async fn find_or_create(&self, queue: &Queue, name: &str) -> BrokerResult<Option<GroupRow>> {
        let key = (queue.id, name.to_owned());
        if let Some(row) = self.rows.get(&key) {
            return Ok(Some(*row));
        }
        let row = Box::pin(self.contacts.meet(queue.id, name, Want::Row)).await?;
        Ok(row.map(|row| self.remember(key, row)))
    }

    /// Look-ups that wait, for the background tasks that run them.
    pub fn contacts(&self) -> &GroupContacts {
        &self.contacts
    }

    /// Forgets the groups of a queue.
    pub fn forget_queue(&self, queue: QueueId) {
        self.rows.retain(|(of, _), _| *of != queue);
    }

    /// Forgets these groups.
    pub fn forget_groups(&self, ids: &[GroupId]) {
        self.rows.retain(|_, row| !ids.contains(&row.id));
    }

    /// Forgets everything: what other brokers deleted may have been missed.
    pub fn forget_all(&self) {
        self.rows.clear();
    }

    /// The queues on which a group of this name is known here, with its keys.
    pub fn known(&self, name: &str) -> Vec<(QueueId, GroupId)> {
        self.rows.iter().filter(|row| row.key().1 == name).map(|row| (row.key().0, row.id)).collect()
    }

    fn remember(&self, key: (QueueId, String), row: GroupRow) -> GroupRow {
        if self.rows.len() >= CACHED_GROUPS_MAX {
            self.rows.clear();
        }
        self.rows.insert(key, row);
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(group: &str, mode: Option<&str>, from: Option<&str>) -> StartAt {
        let subscription = Subscription { mode: mode.map(Into::into), from: from.map(Into::into) };
        subscription.start(group, DefaultSubscription::New)
    }

    #[test]
    fn the_intent_follows_the_table_of_section_7_10() {
        assert_eq!(start("g", None, None), StartAt::End);
        assert_eq!(start("g", Some("new"), None), StartAt::End);
        assert_eq!(start("g", Some("new-only"), None), StartAt::End);
        assert_eq!(start("g", Some("all"), None), StartAt::Beginning);
        assert_eq!(start("g", Some("from_beginning"), None), StartAt::Beginning);
        assert_eq!(start("g", Some("all"), Some("now")), StartAt::End);
        assert_eq!(start("g", Some("all"), Some("garbage")), StartAt::Beginning);
        assert_eq!(start("g", None, Some("garbage")), StartAt::End);
        assert_eq!(start(QUEUE_MODE_GROUP, Some("new"), Some("now")), StartAt::Beginning);
        let at = DateTime::from_timestamp(1_785_408_164, 0).map(StartAt::Timestamp);
        for text in
            ["2026-07-30T10:42:44Z", "2026-07-30T12:42:44.000+02:00", "2026-07-30 10:42:44", "2026-07-30T10:42:44"]
        {
            assert_eq!(Some(start("g", Some("new"), Some(text))), at, "{text}");
        }
    }
}
