//! The parameters of a pop, written as a chain.

use super::client::encode;

/// One pop request (`spec/push-pop.md` §7.2).
#[derive(Clone, Debug)]
pub struct Pop {
    path: String,
    query: Vec<(String, String)>,
}

impl Pop {
    /// The wildcard route.
    pub fn queue(queue: &str) -> Pop {
        Pop { path: format!("/api/v1/pop/queue/{}", encode(queue)), query: Vec::new() }
    }

    /// The targeted route.
    pub fn partition(queue: &str, partition: &str) -> Pop {
        let mut pop = Pop::queue(queue);
        pop.path.push_str("/partition/");
        pop.path.push_str(&encode(partition));
        pop
    }

    /// The discovery route.
    pub fn discover() -> Pop {
        Pop { path: "/api/v1/pop".to_owned(), query: Vec::new() }
    }

    /// Any parameter.
    pub fn set(mut self, key: &str, value: impl ToString) -> Pop {
        self.query.push((key.to_owned(), value.to_string()));
        self
    }

    pub fn group(self, group: &str) -> Pop {
        self.set("consumerGroup", group)
    }

    /// From the oldest retained message.
    pub fn all(self) -> Pop {
        self.set("subscriptionMode", "all")
    }

    pub fn batch(self, messages: i64) -> Pop {
        self.set("batch", messages)
    }

    pub fn partitions(self, count: i64) -> Pop {
        self.set("partitions", count)
    }

    /// Lease seconds of this pop.
    pub fn lease(self, seconds: i64) -> Pop {
        self.set("leaseSeconds", seconds)
    }

    /// A long poll.
    pub fn wait_ms(self, timeout_ms: i64) -> Pop {
        self.set("wait", "true").set("timeout", timeout_ms)
    }

    pub fn auto_ack(self) -> Pop {
        self.set("autoAck", "true")
    }

    /// What goes on the request line.
    pub fn target(&self) -> String {
        let pairs: Vec<String> = self.query.iter().map(|(k, v)| format!("{}={}", encode(k), encode(v))).collect();
        if pairs.is_empty() { self.path.clone() } else { format!("{}?{}", self.path, pairs.join("&")) }
    }
}
