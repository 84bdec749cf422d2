//! How environment variables become flags.
//!
//! Each variable that is set is put on the command line in front of what was typed, so that there is one parser and what
//! was typed wins. Before that, the rules of security-operations §13.1 apply: empty means unset; a boolean that is none is
//! fatal; a number that is none is ignored (here: with a warning); counts, sizes and intervals are raised to 1.

use std::any::TypeId;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

use clap::{Arg, Command, CommandFactory};

use super::{Config, ConfigError, boolean};

/// Variables, by name.
#[derive(Debug, Clone, Default)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// Those of this process. Text that is not Unicode is read with replacement characters.
    pub fn of_process() -> Self {
        let text = |text: OsString| text.to_string_lossy().into_owned();
        Self(std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect())
    }
}

impl<const N: usize> From<[(&str, &str); N]> for Environment {
    fn from(pairs: [(&str, &str); N]) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }
}

/// Further names of a variable, in order of precedence. `RUST_LOG` is the main name of the log level because it wins.
const ALIASES: &[(&str, &[&str])] = &[
    ("QUEEN_BIND_ADDR", &["HOST"]),
    ("QUEEN_SERVER_ID", &["HOSTNAME"]),
    ("PG_DATABASE", &["PG_DB"]),
    ("DEFAULT_TIMEOUT", &["POP_DEFAULT_TIMEOUT_MS"]),
    ("QUEEN_ACK_FUSION_SHARDS", &["QUEEN_V2_FUSION_SHARDS"]),
    ("RUST_LOG", &["LOG_LEVEL"]),
];

/// Numbers for which zero has a meaning.
const ZERO_ALLOWED: &[&str] = &[
    "PORT",
    "PG_PORT",
    "REGENT_DRAIN_MS_MAX",
    "REGENT_SEGMENT_CACHE_MB",
    "QUEEN_POP_AUTOPILOT_BATCH",
    "REGENT_WATCHED_QUEUES_BUSIEST",
    "QUEEN_RETENTION_DUE_CAP",
    "QUEEN_RETENTION_SAFETY_WALK_MS",
];

/// Documented variables that this broker accepts and does not need, by prefix or whole name.
const WITHOUT_EFFECT: &[&str] = &[
    "FILE_BUFFER_FLUSH_MS",
    "FILE_BUFFER_MAX_BATCH",
    "JWT_",
    "METRICS_FLUSH_MS",
    "POP_WAIT_BACKOFF_",
    "POP_WAIT_INITIAL_INTERVAL_MS",
    "POP_WAIT_MAX_INTERVAL_MS",
    "QUEEN_ACK_FUSION_HOLD_MS",
    "QUEEN_ADMISSION_",
    "QUEEN_CACHE_REFRESH_INTERVAL_MS",
    "QUEEN_EPHEMERAL_",
    "QUEEN_HOTLIST",
    "QUEEN_KAFKA_EMBEDDED",
    "QUEEN_KV_",
    "QUEEN_LOG_RATES_MS",
    "QUEEN_LOG_TOPN_QUEUES",
    "QUEEN_MESH_",
    "QUEEN_POP_AUTOPILOT_BURST_CAP",
    "QUEEN_POP_FUSION",
    "QUEEN_POP_PENDING_GATE",
    "QUEEN_PROXY_",
    "QUEEN_S3_EMBEDDED",
    "QUEEN_SQS_EMBEDDED",
    "QUEEN_SWEEPER",
    "QUEEN_SYNC_",
    "QUEEN_TIMERS_",
    "QUEEN_UDP_NOTIFY_PORT",
    "QUEEN_UDP_PEERS",
    "QUEEN_V2_BUNDLE_LOG",
    "QUEEN_V2_BUNDLE_MAX",
    "QUEEN_V2_FUSION_",
    "RETAINED_BYTES_INTERVAL_MS",
    "STATS_INTERVAL_MS",
];

/// Variables of older brokers that are gone (security-operations §16.9).
const REMOVED: &[&str] = &["QUEEN_SEG_", "QUEEN_VEGAS_"];

/// Any other variable that begins like this is taken for a misspelt one.
const OURS: &[&str] = &["QUEEN_", "REGENT_"];

/// What the environment says.
pub(super) struct Read {
    pub(super) arguments: Vec<OsString>,
    pub(super) warnings: Vec<String>,
}

/// The command line of [`Config`] with the variables as documentation only: clap would read the environment by itself,
/// with other rules, and tests could not give theirs.
pub(super) fn command(documented: &Command) -> Command {
    documented.clone().mut_args(|arg| {
        let Some(main) = variable(&arg).map(str::to_owned) else { return arg };
        let shown = names(&main).collect::<Vec<_>>().join(", ");
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        arg.env(None::<&str>).help(format!("{help} [env: {shown}]"))
    })
}

/// Turns `env` into arguments for [`command`].
pub(super) fn read(documented: &Command, env: &Environment) -> Result<Read, ConfigError> {
    let mut read = Read { arguments: Vec::new(), warnings: Vec::new() };
    for arg in documented.get_arguments() {
        let (Some(main), Some(flag)) = (variable(arg), arg.get_long()) else { continue };
        let given = names(main).find_map(|name| env.0.get_key_value(name).filter(|(_, value)| is_set(value)));
        let Some((name, value)) = given else { continue };
        match accept(arg, flag, name, value)? {
            Some(value) => read.arguments.push(format!("--{flag}={value}").into()),
            None => read.warnings.push(format!("{name}=\"{value}\" is not a number that fits, using the default")),
        }
    }
    read.warnings.extend(strangers(documented, env));
    Ok(read)
}

/// The text for the flag, or nothing where the default holds.
fn accept(arg: &Arg, flag: &str, name: &str, value: &str) -> Result<Option<String>, ConfigError> {
    let kind = arg.get_value_parser().type_id();
    if kind == TypeId::of::<bool>() {
        return match boolean(value) {
            Ok(value) => Ok(Some(value.to_string())),
            Err(_) => Err(ConfigError::NotABoolean { name: name.to_owned(), value: value.to_owned() }),
        };
    }
    if kind == TypeId::of::<f64>() && value.trim().parse::<f64>().is_err() {
        return Ok(None);
    }
    if let Some(max) = integer_max(arg) {
        let floor = i128::from(counts_above_zero(arg));
        let number = value.trim().parse::<i128>().ok().map(|number| number.max(floor)).filter(|number| *number <= max);
        return Ok(number.map(|number| number.to_string()));
    }
    if let Some(mut possible) = arg.get_value_parser().possible_values() {
        let value = value.trim();
        if !possible.any(|word| word.matches(value, true)) {
            let words: Vec<String> = arg.get_possible_values().iter().map(|word| word.get_name().to_owned()).collect();
            return Err(ConfigError::Invalid {
                flag: flag.to_owned(),
                variable: name.to_owned(),
                value: value.to_owned(),
                why: format!("must be one of {}", words.join(", ")),
            });
        }
        return Ok(Some(value.to_owned()));
    }
    Ok(Some(value.to_owned()))
}

/// The largest value of an integer argument; nothing for other arguments.
fn integer_max(arg: &Arg) -> Option<i128> {
    let kind = arg.get_value_parser().type_id();
    [
        (TypeId::of::<u8>(), i128::from(u8::MAX)),
        (TypeId::of::<u16>(), i128::from(u16::MAX)),
        (TypeId::of::<u32>(), i128::from(u32::MAX)),
        (TypeId::of::<u64>(), i128::from(u64::MAX)),
        (TypeId::of::<usize>(), i128::from(u64::MAX)),
    ]
    .into_iter()
    .find_map(|(id, max)| (kind == id).then_some(max))
}

/// Whether the argument is an integer for which zero makes no sense.
pub(super) fn counts_above_zero(arg: &Arg) -> bool {
    integer_max(arg).is_some() && variable(arg).is_some_and(|name| !ZERO_ALLOWED.contains(&name))
}

/// The main variable of an argument of the documented command.
pub(super) fn variable(arg: &Arg) -> Option<&str> {
    arg.get_env().and_then(|name| name.to_str())
}

/// The main variable of a flag, for messages.
pub(super) fn variable_of(flag: &str) -> String {
    let command = Config::command();
    let arg = command.get_arguments().find(|arg| arg.get_long() == Some(flag));
    arg.and_then(variable).unwrap_or_default().to_owned()
}

fn names(main: &str) -> impl Iterator<Item = &str> {
    let further = ALIASES.iter().find(|(name, _)| *name == main).map_or(&[][..], |(_, further)| *further);
    std::iter::once(main).chain(further.iter().copied())
}

fn is_set(value: &str) -> bool {
    !value.trim().is_empty()
}

fn begins(name: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// Warnings about variables that set nothing here: most are meant for another broker, or misspelt.
fn strangers(documented: &Command, env: &Environment) -> Vec<String> {
    let known: BTreeSet<&str> = documented.get_arguments().filter_map(variable).flat_map(names).collect();
    let (mut removed, mut inert, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
    let set = env.0.iter().filter(|(_, value)| is_set(value)).map(|(name, _)| name.as_str());
    for name in set.filter(|name| !known.contains(name)) {
        if begins(name, REMOVED) {
            removed.push(name);
        } else if begins(name, WITHOUT_EFFECT) {
            inert.push(name);
        } else if begins(name, OURS) {
            unknown.push(name);
        }
    }
    [
        (removed, "of older brokers, without effect"),
        (inert, "accepted without effect in this version"),
        (unknown, "unknown, without effect"),
    ]
    .into_iter()
    .filter(|(names, _)| !names.is_empty())
    .map(|(names, what)| format!("{what}: {}", names.join(", ")))
    .collect()
}
