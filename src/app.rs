//! Placeholder for the composition root: it listens, and that is all. The real one replaces this file.

use std::net::SocketAddr;

use tokio::net::TcpListener;

use crate::config::Config;
use crate::shutdown::Shutdown;

/// A broker that serves nothing yet.
#[derive(Debug)]
pub struct App {
    listener: TcpListener,
    local_addr: SocketAddr,
    shutdown: Shutdown,
}

impl App {
    /// Binds the listener.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn start(config: Config, shutdown: Shutdown) -> std::io::Result<Self> {
        let listener = TcpListener::bind((config.http.host.as_str(), config.http.port)).await?;
        let local_addr = listener.local_addr()?;
        Ok(Self { listener, local_addr, shutdown })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Runs until the shutdown.
    ///
    /// # Errors
    /// None yet.
    pub async fn run(self) -> std::io::Result<()> {
        self.shutdown.soft().cancelled().await;
        drop(self.listener);
        Ok(())
    }
}
