//! What a broker says about its link to the others, and a wake-up from outside (`spec/admin.md` §13.5, §13.6).

use super::Broker;
use super::error::BrokerResult;
use super::push_flush::Appended;
pub use crate::store::brokers::PeerRow;

impl Broker {
    /// Wakes the parked pops of a queue, here and on the other brokers, as a push would: of one partition, or of all. What
    /// does not exist wakes nobody.
    pub async fn notify(&self, queue: &str, partition: Option<&str>) -> BrokerResult<()> {
        let Some(queue) = self.queues.find(queue).await? else { return Ok(()) };
        let partition = match partition {
            Some(name) => self.store.find_partition(queue.id, name).await?,
            None => None,
        };
        if let Some(partition) = partition {
            let appended = [Appended { queue: queue.id, partition, is_new: false }];
            self.ready.appended(&appended);
            self.peers.landed(&appended);
            return Ok(());
        }
        self.ready.reconsider(queue.id);
        for group in self.ready.groups().into_iter().filter(|group| group.queue == queue.id) {
            self.ready.walk_again(&group).await?;
        }
        self.peers.landed_widely(queue.id);
        Ok(())
    }

    /// The other brokers on this database that were seen within the last hour.
    pub async fn peer_rows(&self) -> BrokerResult<Vec<PeerRow>> {
        Ok(self.store.list_brokers(self.peers.id()).await?)
    }

    /// Name of this broker among others.
    pub fn name(&self) -> &str {
        &self.pop.settings.name
    }
}
