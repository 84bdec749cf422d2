//! The disk spool for pushes that the database cannot take (`spec/security-operations.md` §10).

use std::path::PathBuf;

use clap::Args;

/// Where it is and how large it may become.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Disk spool")]
pub struct SpoolConfig {
    /// Directory of the spool, of this broker alone [default: spool in the data directory]
    #[arg(long, env = "FILE_BUFFER_DIR", value_name = "DIR")]
    pub file_buffer_dir: Option<PathBuf>,

    /// Payloads that the spool holds at most, in MiB; beyond it pushes answer failed
    #[arg(long = "file-buffer-mb", env = "REGENT_FILE_BUFFER_MB", value_name = "MIB", default_value_t = 4_096)]
    pub mib_max: u64,

    /// Records of one spool file
    #[arg(
        long = "file-buffer-events-per-file",
        env = "FILE_BUFFER_EVENTS_PER_FILE",
        value_name = "N",
        default_value_t = 10_000
    )]
    pub records_per_file: usize,
}
