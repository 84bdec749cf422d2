//! The command line: common flags, and one set of flags per scenario.
//!
//! Every scenario runs on two cores without any flag. `--scale` multiplies what grows with the machine: rates,
//! connections and sizes, as each scenario says.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

/// Load generator and delivery checker for brokers that speak the Queen MQ 1.x HTTP protocol.
#[derive(Parser, Debug)]
#[command(name = "regent-load", version)]
pub struct Cli {
    /// What to run.
    #[command(subcommand)]
    pub scenario: Scenario,
    /// Flags that every scenario understands.
    #[command(flatten)]
    pub common: Common,
}

/// Flags that every scenario understands.
#[derive(Args, Debug, Clone, Serialize)]
pub struct Common {
    /// Broker to drive; loopback or not, only plain HTTP.
    #[arg(long, global = true, default_value = "http://127.0.0.1:6632")]
    pub url: String,
    /// Length of the measured window [default: 30; soak: 3600].
    #[arg(long, global = true, value_name = "SECONDS")]
    pub duration: Option<f64>,
    /// Time under load before the window opens.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 5.0)]
    pub warmup: f64,
    /// Seed of payloads, lane choice and, in `chaos`, of the kills.
    #[arg(long, global = true, default_value_t = 1)]
    pub seed: u64,
    /// Size of one payload, as JSON, quotes included; at least 64.
    #[arg(long, global = true, value_name = "BYTES", default_value_t = 256)]
    pub payload: usize,
    /// Multiplies what the scenario grows with the machine.
    #[arg(long, global = true, value_name = "FACTOR", default_value_t = 1.0)]
    pub scale: f64,
    /// Write every figure, the settings, versions and machine to this file.
    #[arg(long, global = true, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Process of the broker [default: the one that listens on the port of --url, when that is loopback].
    #[arg(long, global = true, value_name = "PID")]
    pub broker_pid: Option<i32>,
    /// Data directory of the broker's PostgreSQL, for CPU, memory and the way to its statistics.
    #[arg(long, global = true, value_name = "DIR")]
    pub pg_data_dir: Option<PathBuf>,
    /// PostgreSQL to ask for WAL, commits, fsyncs and table sizes.
    #[arg(long, global = true, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    #[serde(skip)]
    pub database_url: Option<String>,
    /// Open loop: messages a second on a fixed schedule. 0 means closed loop [default: by scenario].
    #[arg(long, global = true, value_name = "MSG_PER_S")]
    pub rate: Option<f64>,
    /// Connections that push [default: by scenario].
    #[arg(long, global = true)]
    pub producers: Option<usize>,
    /// Connections that pop and ack, per group [default: by scenario].
    #[arg(long, global = true)]
    pub consumers: Option<usize>,
    /// Messages of one push [default: by scenario].
    #[arg(long, global = true)]
    pub push_batch: Option<usize>,
    /// Messages of one pop at most [default: by scenario].
    #[arg(long, global = true, visible_alias = "batch")]
    pub pop_batch: Option<usize>,
    /// Partitions of one pop at most [default: by scenario].
    #[arg(long, global = true)]
    pub pop_partitions: Option<usize>,
    /// Partitions (queues in `thin` and `parked`) [default: by scenario].
    #[arg(long, global = true)]
    pub partitions: Option<u32>,
    /// Producers wait while more messages than this are stored and not acknowledged [default: by scenario].
    #[arg(long, global = true)]
    pub backlog: Option<u64>,
    /// Lease that every pop asks for [default: 30; chaos: 5].
    #[arg(long, global = true)]
    pub lease_seconds: Option<u32>,
    /// Options of the queue, sent to `/api/v1/configure` first, as JSON: '{"dedupWindowSeconds":60}'.
    #[arg(long, global = true, value_name = "JSON")]
    pub queue_options: Option<String>,
    /// How long the drain at the end may take before what is left counts as lost.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 90.0)]
    pub drain_timeout: f64,
    /// Threads of the generator.
    #[arg(long, global = true, default_value_t = 1)]
    pub threads: usize,
    /// Seconds between two progress lines when standard error is not a terminal [default: 5; soak: 60].
    #[arg(long, global = true, value_name = "SECONDS")]
    pub every: Option<f64>,
    /// Send this bearer token.
    #[arg(long, global = true, env = "REGENT_LOAD_TOKEN", hide_env_values = true)]
    #[serde(skip)]
    pub token: Option<String>,
}

/// What to run.
#[derive(Subcommand, Debug, Clone)]
pub enum Scenario {
    /// 200 partitions, pushes of 100, pops of 1000, everything acknowledged.
    Dense,
    /// 1,000 partitions, pushes of 10, pops of 100.
    Ordinary,
    /// 10,000 queues, one message at a time, one waiting consumer on each.
    Thin(ThinArgs),
    /// A pre-filled queue, only pops and acks; can compare the broker's switches.
    Ack(AckArgs),
    /// A million partitions made by push, then 1,000 active a second.
    Million(MillionArgs),
    /// Many waiting consumers on quiet queues, then a trickle.
    Parked(ParkedArgs),
    /// Several groups over one queue.
    Fanout(FanoutArgs),
    /// Consume, forward in a transaction, consume again.
    Relay,
    /// Another scenario for hours, with periodic lines.
    Soak(SoakArgs),
    /// Produce and consume while the broker and its database are killed and restarted.
    Chaos(ChaosArgs),
    /// No load: a proxy that spreads the requests of others over several brokers.
    RoundRobin(RoundRobinArgs),
}

/// How `thin` consumes.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Consume {
    /// One consumer waits on each queue.
    Parked,
    /// `--consumers` workers pop by namespace, over all queues.
    Discovery,
}

/// Flags of `thin`.
#[derive(Args, Debug, Clone, Serialize)]
pub struct ThinArgs {
    /// How messages are consumed.
    #[arg(long, value_enum, default_value_t = Consume::Parked)]
    pub consume: Consume,
}

/// Flags of `ack`.
#[derive(Args, Debug, Clone, Serialize)]
pub struct AckArgs {
    /// Messages of one measured round, times --scale.
    #[arg(long, default_value_t = 200_000)]
    pub messages: u64,
    /// Rounds over all variants; needs --broker-cmd.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Start and restart the broker with this command; `{port}` and `{dir}` are filled in.
    #[arg(long, value_name = "COMMAND")]
    pub broker_cmd: Option<String>,
    /// Directory given as `{dir}` [default: a temporary one].
    #[arg(long, value_name = "DIR")]
    pub broker_dir: Option<PathBuf>,
    /// Pop everything first, then measure nothing but acks.
    #[arg(long)]
    pub claim_first: bool,
    /// With --claim-first: so often, --messages each time. Push and pop between the waves are not measured.
    #[arg(long, default_value_t = 3)]
    pub waves: usize,
    /// Lease half of the messages, then the rest: memory of the broker per live lease.
    #[arg(long, conflicts_with_all = ["claim_first", "partial", "lone", "retained"])]
    pub lease_memory: bool,
    /// Pop 1,000 and acknowledge single messages of the batch before the rest: the resolution path.
    #[arg(long, conflicts_with_all = ["claim_first", "lone"])]
    pub partial: bool,
    /// One consumer, so that no ack finds company: the latency of a lone ack.
    #[arg(long)]
    pub lone: bool,
    /// Push and consume this many messages beforehand, so that the tables hold rows.
    #[arg(long, default_value_t = 0)]
    pub retained: u64,
}

/// Which partitions are active in one second.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Neighbours in order of creation.
    Rotating,
    /// Spread over all of them.
    Scattered,
}

/// Flags of `million`; the number of partitions is --partitions.
#[derive(Args, Debug, Clone, Serialize)]
pub struct MillionArgs {
    /// Which partitions are active in one second.
    #[arg(long, value_enum, default_value_t = Pattern::Rotating)]
    pub pattern: Pattern,
    /// Active partitions a second.
    #[arg(long, default_value_t = 1_000)]
    pub active: u32,
    /// After the run, watch the idle broker and database for this long.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub idle: f64,
    /// Before that, wait until the database has done what the load left it (vacuum), at most this long.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub settle: u64,
    /// Start the broker with this command, and time a restart at the end; `{port}` and `{dir}` are filled in.
    #[arg(long, value_name = "COMMAND")]
    pub broker_cmd: Option<String>,
    /// Directory given as `{dir}` [default: a temporary one].
    #[arg(long, value_name = "DIR")]
    pub broker_dir: Option<PathBuf>,
}

/// Flags of `parked`.
#[derive(Args, Debug, Clone, Serialize)]
pub struct ParkedArgs {
    /// Waiting consumers, times --scale.
    #[arg(long, default_value_t = 10_000)]
    pub waiting: usize,
    /// Push to this broker instead, on the same database: what a consumer waits for comes from elsewhere [default: --url].
    #[arg(long, value_name = "URL")]
    pub push_url: Option<String>,
}

/// Flags of `fanout`.
#[derive(Args, Debug, Clone, Serialize)]
pub struct FanoutArgs {
    /// Consumer groups.
    #[arg(long, default_value_t = 4)]
    pub groups: usize,
}

/// Flags of `soak`.
#[derive(Args, Debug, Clone, Serialize)]
pub struct SoakArgs {
    /// The scenario to repeat.
    #[arg(long, value_enum, default_value_t = SoakOf::Ordinary)]
    pub of: SoakOf,
}

/// What `soak` can run.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SoakOf {
    /// See `dense`.
    Dense,
    /// See `ordinary`.
    Ordinary,
    /// See `thin`.
    Thin,
    /// See `million`.
    Million,
    /// See `fanout`.
    Fanout,
    /// See `relay`.
    Relay,
    /// See `parked`.
    Parked,
}

/// Flags of `chaos`.
#[derive(Args, Debug, Clone, Serialize)]
pub struct ChaosArgs {
    /// Start the broker with this command; `{port}` and `{dir}` are filled in.
    #[arg(long, value_name = "COMMAND")]
    pub broker_cmd: String,
    /// Directory given as `{dir}` [default: a temporary one].
    #[arg(long, value_name = "DIR")]
    pub broker_dir: Option<PathBuf>,
    /// Seconds between two kills, on average.
    #[arg(long, default_value_t = 4.0)]
    pub kill_every: f64,
    /// Kill only the broker, also when --pg-data-dir is given.
    #[arg(long)]
    pub spare_database: bool,
}

/// Flags of `round-robin`.
#[derive(Args, Debug, Clone)]
pub struct RoundRobinArgs {
    /// Address to listen on; port 0 takes any free one.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// A broker, as http://HOST:PORT; repeat it for each.
    #[arg(long, value_name = "URL", required = true)]
    pub to: Vec<String>,
}
