#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

fn load<const A: usize, const E: usize>(args: [&str; A], env: [(&str, &str); E]) -> Result<Config, ConfigError> {
    Config::from_parts(std::iter::once("regent").chain(args), &Environment::from(env))
}

fn env<const E: usize>(env: [(&str, &str); E]) -> Config {
    load([], env).unwrap()
}

fn refusal<const A: usize, const E: usize>(args: [&str; A], env: [(&str, &str); E]) -> String {
    load(args, env).unwrap_err().to_string()
}

#[test]
fn the_command_line_definition_is_sound_and_every_flag_has_a_variable() {
    let command = Config::command();
    environment::command(&command).debug_assert();
    let mut seen = std::collections::BTreeSet::new();
    for arg in command.get_arguments() {
        let variable = environment::variable(arg).unwrap_or_else(|| panic!("{} has no variable", arg.get_id()));
        assert!(seen.insert(variable), "{variable} is used twice");
        assert!(arg.get_help().is_some(), "{} has no help", arg.get_id());
    }
}

#[test]
fn defaults_are_the_documented_ones() {
    let config = env([]);
    assert_eq!((config.http.host.as_str(), config.http.port), ("127.0.0.1", 6632));
    assert_eq!(config.http.body_bytes_max, 67_108_864);
    assert_eq!(config.data_dir, PathBuf::from("./data"));
    assert_eq!(config.postgres.database(), Database::Embedded);
    assert_eq!((config.postgres.pool_size, config.postgres.connections_max()), (24, 31));
    assert_eq!(config.postgres.statement_timeout_ms, 30_000);
    assert_eq!(config.postgres.pool_checkout_timeout_ms, 5_000);
    assert_eq!(config.pop.timeout_ms_default, 30_000);
    assert_eq!(config.pop.subscription_mode_default, SubscriptionMode::New);
    assert!(config.fusion.ack_registry && config.fusion.ack_fusion && !config.fusion.ack_serial);
    assert_eq!(config.fusion.ack_registry_bytes_max(), 64 << 20);
    assert_eq!(config.push.zstd_level, 3);
    assert!(config.postgres.apply_schema && config.security.encryption_key.is_none());
    assert!(config.server_id.starts_with("regent-"));
}

#[test]
fn a_flag_wins_over_a_variable_and_a_variable_over_the_default() {
    assert_eq!(env([("PORT", "7000")]).http.port, 7000);
    let config = load(["--port", "7001", "--ack-fusion=on"], [("PORT", "7000"), ("QUEEN_ACK_FUSION", "off")]).unwrap();
    assert_eq!(config.http.port, 7001);
    assert!(config.fusion.ack_fusion);
    assert!(load(["--log-json"], []).unwrap().log.json, "a bare boolean flag is true");
    assert!(!load(["--log-json", "no"], []).unwrap().log.json);
}

#[test]
fn booleans_are_read_as_documented_and_anything_else_is_fatal() {
    for text in ["true", "1", " YES ", "on"] {
        assert!(env([("QUEEN_LOG_JSON", text)]).log.json, "{text}");
    }
    for text in ["false", "0", "No", "off", "", "  "] {
        assert!(!env([("QUEEN_LOG_JSON", text)]).log.json, "{text}");
    }
    assert!(env([("QUEEN_ACK_FUSION", "")]).fusion.ack_fusion, "empty is the default");
    assert_eq!(
        refusal([], [("QUEEN_ACK_FUSION", "ja")]),
        "QUEEN_ACK_FUSION=\"ja\" is not a boolean (expected true/false, 1/0, yes/no, on/off)"
    );
}

#[test]
fn numbers_that_are_none_count_as_unset_and_counts_are_raised_to_one() {
    let config = env([
        ("DB_POOL_SIZE", "many"),
        ("QUEEN_STMT_TIMEOUT_MS", "-5"),
        ("QUEEN_ACK_FUSION_SHARDS", "0"),
        ("PORT", "70000"),
        ("REGENT_DRAIN_MS_MAX", "0"),
    ]);
    assert_eq!(config.postgres.pool_size, 24);
    assert_eq!(config.postgres.statement_timeout_ms, 1);
    assert_eq!(config.fusion.ack_fusion_shards, 1);
    assert_eq!(config.http.port, 6632);
    assert_eq!(config.http.drain_ms_max, 0);
    let warnings = config.report.warnings.join("\n");
    assert!(warnings.contains("DB_POOL_SIZE=\"many\"") && warnings.contains("PORT=\"70000\""), "{warnings}");
    assert_eq!(env([("PORT", "0")]).http.port, 0);
}

#[test]
fn a_bad_autopilot_is_fatal() {
    let config = env([("QUEEN_POP_AUTOPILOT", "Shadow"), ("QUEEN_POP_AUTOPILOT_TARGET_AGE_MS", "40.5")]);
    assert_eq!(config.pop.autopilot.mode, PopAutopilot::Shadow);
    assert_eq!(config.pop.autopilot.target_age_ms, 40.5);
    let defaults = env([("QUEEN_POP_AUTOPILOT_TARGET_AGE_MS", "soon"), ("QUEEN_POP_AUTOPILOT_DWELL_POPS", "0")]).pop;
    assert_eq!((defaults.autopilot.mode, defaults.autopilot.batch), (PopAutopilot::On, 100));
    assert_eq!((defaults.autopilot.target_age_ms, defaults.autopilot.dwell_pops), (25.0, 1));
    for (name, value) in [
        ("QUEEN_POP_AUTOPILOT", "auto"),
        ("QUEEN_POP_AUTOPILOT_BATCH", "0"),
        ("QUEEN_POP_AUTOPILOT_BATCH", "10001"),
        ("QUEEN_POP_AUTOPILOT_TARGET_AGE_MS", "-1"),
        ("QUEEN_POP_AUTOPILOT_TARGET_AGE_MS", "nan"),
    ] {
        assert!(refusal([], [(name, value)]).contains(name), "{name}={value}");
    }
}

#[test]
fn a_zero_or_a_word_typed_for_a_count_is_refused() {
    assert_eq!(refusal(["--pool-size", "0"], []), "--pool-size (DB_POOL_SIZE) is 0: must be at least 1");
    assert!(matches!(load(["--pool-size", "many"], []), Err(ConfigError::CommandLine(_))));
    assert!(matches!(load(["--no-such-flag"], []), Err(ConfigError::CommandLine(_))));
}

#[test]
fn further_names_count_after_the_main_one() {
    assert_eq!(env([("HOST", "0.0.0.0")]).http.host, "0.0.0.0");
    assert_eq!(env([("HOST", "a"), ("QUEEN_BIND_ADDR", "b")]).http.host, "b");
    assert_eq!(env([("POP_DEFAULT_TIMEOUT_MS", "7")]).pop.timeout_ms_default, 7);
    assert_eq!(env([("POP_DEFAULT_TIMEOUT_MS", "7"), ("DEFAULT_TIMEOUT", "8")]).pop.timeout_ms_default, 8);
    let shards = env([("QUEEN_V2_FUSION_SHARDS", "5")]);
    assert_eq!((shards.push.fusion_shards, shards.fusion.ack_fusion_shards), (5, 5));
    assert_eq!(env([("LOG_LEVEL", "warn")]).log.level, "warn");
    assert_eq!(env([("LOG_LEVEL", "warn"), ("RUST_LOG", "debug")]).log.level, "debug");
    assert_eq!(env([("QUEEN_SERVER_ID", ""), ("HOSTNAME", "pod-0")]).server_id, "pod-0");
}

#[test]
fn the_database_is_the_url_or_made_of_its_parts_or_embedded() {
    let url = |config: &Config| match config.postgres.database() {
        Database::Outside(url) => url.expose().to_owned(),
        Database::Embedded => "embedded".to_owned(),
    };
    assert_eq!(url(&env([("DATABASE_URL", "postgres://u@h/d"), ("PG_HOST", "x")])), "postgres://u@h/d");
    assert_eq!(url(&env([("DATABASE_URL", ""), ("PG_USE_SSL", "true")])), "embedded");
    assert_eq!(
        url(&env([
            ("PG_HOST", "db"),
            ("PG_PORT", "5433"),
            ("PG_USER", "a@b"),
            ("PG_PASSWORD", "p/w:"),
            ("PG_DB", "q")
        ])),
        "postgres://a%40b:p%2Fw%3A@db:5433/q?sslmode=disable"
    );
    assert_eq!(
        url(&env([("PG_USER", "queen"), ("PG_DATABASE", ""), ("PG_USE_SSL", "1")])),
        "postgres://queen:postgres@localhost:5432/postgres?sslmode=verify-full"
    );
    assert_eq!(
        url(&env([("PG_HOST", "/run/pg"), ("PG_USE_SSL", "1"), ("PG_SSL_REJECT_UNAUTHORIZED", "0")])),
        "postgres://postgres:postgres@%2Frun%2Fpg:5432/postgres?sslmode=require"
    );
    assert!(url(&env([("PG_HOST", "::1")])).contains("@[::1]:5432/"));
    let refused = refusal([], [("DATABASE_URL", "mysql://root:hunter2@h/d")]);
    assert!(refused.contains("--database-url (DATABASE_URL)") && !refused.contains("hunter2"), "{refused}");
}

#[test]
fn a_certificate_authority_is_text_and_whole() {
    let refused = |pem: &str| refusal([], [("PG_HOST", "h"), ("PG_USE_SSL", "1"), ("PG_SSL_ROOT_CERT", pem)]);
    assert!(refused("/etc/ssl/ca.pem").contains("not a path"));
    assert!(refused("-----BEGIN CERTIFICATE-----\\nAAAA").contains("without its END"));
    assert!(refused("-----BEGIN CERTIFICATE-----\\n!!\\n-----END CERTIFICATE-----").contains("not base64"));
    let pem = "-----BEGIN CERTIFICATE-----\\nAAAA\\n-----END CERTIFICATE-----";
    let config = env([("PG_HOST", "h"), ("PG_USE_SSL", "1"), ("PG_SSL_ROOT_CERT", pem)]);
    assert!(config.postgres.root_cert_pem().unwrap().contains("-----\nAAAA\n-----"));
}

#[test]
fn a_bind_address_carries_no_port() {
    assert!(refusal([], [("QUEEN_BIND_ADDR", "0.0.0.0:6632")]).contains("without a port"));
    assert_eq!(env([("QUEEN_BIND_ADDR", "::1")]).http.host, "::1");
}

#[test]
fn the_encryption_key_is_64_hex_characters() {
    let key = |text: &str| load([], [("QUEEN_ENCRYPTION_KEY", text)]);
    assert_eq!(key(&"ab".repeat(32)).unwrap().security.encryption_key.unwrap().bytes(), &[0xab; 32]);
    assert_eq!(key("").unwrap().security.encryption_key, None);
    let newline = format!("{}\n", "ab".repeat(32));
    assert_eq!(key(&newline).unwrap_err().to_string(), "QUEEN_ENCRYPTION_KEY must be 64 hex chars");
    assert_eq!(key(&"zz".repeat(32)).unwrap_err().to_string(), "QUEEN_ENCRYPTION_KEY is not valid hex");
}

#[test]
fn protection_that_is_not_given_is_refused_rather_than_ignored() {
    assert_eq!(
        refusal([], [("JWT_ENABLED", "true"), ("JWT_SECRET", "x")]),
        "JWT_ENABLED=true, but this version does not authenticate requests; it refuses to start rather than serve \
         everybody"
    );
    assert_eq!(
        refusal([], [("QUEEN_TENANCY_HEADER", "1"), ("QUEEN_KV_TRUSTED_PROXY", "true")]),
        "QUEEN_TENANCY_HEADER=true, but this version does not separate tenants; it refuses to start rather than serve \
         everybody"
    );
    assert!(refusal(["--jwt-enabled"], []).starts_with("JWT_ENABLED=true"));
    assert!(refusal([], [("JWT_ENABLED", "ja")]).contains("is not a boolean"));
    assert!(env([("JWT_ENABLED", "false"), ("QUEEN_TENANCY_HEADER", "")]).report.warnings.is_empty());
}

#[test]
fn limits_that_do_not_fit_together_are_refused_by_name_and_value() {
    assert_eq!(
        refusal(["--ack-fusion-queue-max", "10"], []),
        "--ack-fusion-queue-max (REGENT_ACK_FUSION_QUEUE_MAX) is 10: must be at least --ack-fusion-rows-max, \
         or no commit could ever be full"
    );
    assert!(refusal(["--body-bytes-max", "1000000000"], []).starts_with("--request-memory-mb"));
    assert!(refusal(["--zstd-level", "20"], []).contains("must be 1 to 19"));
    assert!(refusal([], [("QUEEN_V2_FUSION_SHARDS", "257")]).contains("at most 256"));
}

#[test]
fn no_more_ack_commits_than_connections_and_none_below_one_row() {
    assert_eq!(
        refusal(["--ack-fusion-shards", "25"], []),
        "--ack-fusion-shards (QUEEN_ACK_FUSION_SHARDS) is 25: must not be above --pool-size, \
         or not every shard could have a commit in flight"
    );
    assert_eq!(load(["--ack-fusion-shards", "24"], []).unwrap().fusion.ack_fusion_shards, 24);
    assert!(refusal(["--ack-fusion-shards", "2", "--pool-size", "1"], []).contains("must not be above --pool-size"));
    assert_eq!(env([("DB_POOL_SIZE", "1")]).fusion.ack_fusion_shards, 1, "the default gives way");
    assert_eq!(
        refusal([], [("REGENT_ACK_FUSION_BYTES_MAX", "43")]),
        "--ack-fusion-bytes-max (REGENT_ACK_FUSION_BYTES_MAX) is 43: must be at least 44, or no row would fit"
    );
    assert_eq!(env([("REGENT_ACK_FUSION_BYTES_MAX", "44")]).fusion.ack_fusion_bytes_max, 44);
}

#[test]
fn ack_switches_without_effect_are_named() {
    let warnings = |args: &[&str]| {
        let args = std::iter::once("regent").chain(args.iter().copied());
        Config::from_parts(args, &Environment::default()).unwrap().report.warnings
    };
    assert_eq!(warnings(&["--ack-registry=off"]), ["--ack-fusion is without effect while --ack-registry is off"]);
    assert!(warnings(&["--ack-registry=off", "--ack-fusion=off"]).is_empty());
    assert!(warnings(&["--ack-fusion=off"]).is_empty());
    let slow = "--ack-serial settles one ack at a time, which is slow";
    assert_eq!(warnings(&["--ack-serial"]), [format!("{slow}; without effect: --ack-registry, --ack-fusion")]);
    assert_eq!(warnings(&["--ack-serial", "--ack-registry=off"]), [format!("{slow}; without effect: --ack-fusion")]);
    assert_eq!(warnings(&["--ack-serial", "--ack-registry=off", "--ack-fusion=off"]), [slow]);
    assert!(env([("REGENT_ACK_SERIAL", "1")]).fusion.ack_serial);
    assert_eq!(env([("REGENT_ACK_SERIAL", "on")]).report.changes(), ["Ack: ack_serial=true"]);
}

#[test]
fn words_are_checked_wherever_they_come_from() {
    assert_eq!(env([("DEFAULT_SUBSCRIPTION_MODE", "ALL")]).pop.subscription_mode_default, SubscriptionMode::All);
    assert_eq!(env([("DEFAULT_SUBSCRIPTION_MODE", "new-only")]).pop.subscription_mode_default, SubscriptionMode::New);
    assert_eq!(
        refusal([], [("DEFAULT_SUBSCRIPTION_MODE", "newest")]),
        "--default-subscription-mode (DEFAULT_SUBSCRIPTION_MODE) is newest: must be one of new, all"
    );
}

#[test]
fn strange_variables_are_named_once_and_others_left_alone() {
    let config = env([
        ("QUEEN_ACK_FUSON", "1"),
        ("REGENT_POOL_SIZE", "1"),
        ("QUEEN_VEGAS_ALPHA", "1"),
        ("QUEEN_MESH_PORT", "1"),
        ("FILE_BUFFER_MAX_BATCH", "7"),
        ("JWT_ALGORITHM", "RS256"),
        ("JWT_SECRET", ""),
        ("QUEEN_ACK_FUSION_HOLD_MS", "3"),
        ("PATH", "/bin"),
    ]);
    assert_eq!(
        config.report.warnings,
        [
            "of older brokers, without effect: QUEEN_VEGAS_ALPHA",
            "accepted without effect in this version: FILE_BUFFER_MAX_BATCH, JWT_ALGORITHM, \
             QUEEN_ACK_FUSION_HOLD_MS, QUEEN_MESH_PORT",
            "unknown, without effect: QUEEN_ACK_FUSON, REGENT_POOL_SIZE"
        ]
    );
}

#[test]
fn the_boot_log_says_what_differs_from_the_defaults() {
    let changes = |config: Config| config.report.changes();
    assert_eq!(changes(env([])), ["all defaults"]);
    assert_eq!(
        changes(load(["--ack-fusion=on", "--port", "6632"], [("LOG_LEVEL", "info")]).unwrap()),
        ["all defaults"]
    );
    assert_eq!(
        changes(load(["--port", "7000", "--ack-fusion=off"], [("DB_POOL_SIZE", "60"), ("PG_PASSWORD", "pw")]).unwrap()),
        ["HTTP: port=7000", "PostgreSQL: pg_password=<set:2 chars> pool_size=60", "Ack: ack_fusion=off"]
    );
}

#[test]
fn the_embedded_database_is_reached_without_tls() {
    let mut config = env([("PG_USE_SSL", "true")]);
    config.use_embedded("postgres://u@h/d", EncryptionKey::new([7; 32]));
    assert!(!config.postgres.pg_use_ssl && config.postgres.root_cert_pem().is_none());
}

#[test]
fn secrets_are_never_printed() {
    let key = "ab".repeat(32);
    let config =
        env([("DATABASE_URL", "postgres://u:hunter2@h/d"), ("PG_PASSWORD", "hunter2"), ("QUEEN_ENCRYPTION_KEY", &key)]);
    let printed = format!("{config:?}");
    assert!(!printed.contains("hunter2") && !printed.contains(&key), "{printed}");
    let log = format!("{:?}", config.report.sections);
    assert!(log.contains("pg_password=<set:7 chars>") && log.contains("encryption_key=<set:64 chars>"), "{log}");
    assert!(log.contains("pool_size=24") && log.contains("pg_ssl_root_cert=<unset>"), "{log}");
    assert!(!log.contains("hunter2") && !log.contains(&key), "{log}");
}

#[test]
fn constructors_for_tests_take_any_port() {
    let config = Config::with_database("postgres://u@h/d").unwrap();
    assert_eq!((config.http.host.as_str(), config.http.port), ("127.0.0.1", 0));
    let config = Config::with_data_dir("/tmp/x y").unwrap();
    assert_eq!((config.data_dir, config.http.port), (PathBuf::from("/tmp/x y"), 0));
}

#[test]
fn the_help_shows_variables_and_the_way_without_a_database() {
    let help = refusal(["--help"], []);
    assert!(help.lines().all(|line| line.len() <= 120), "{help}");
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for text in ["[env: DATABASE_URL]", "[env: QUEEN_BIND_ADDR, HOST]", "PostgreSQL:", "[default: 6632]", "Examples:"] {
        assert!(help.contains(text), "{text} is missing from\n{help}");
    }
    assert!(refusal(["--version"], []).starts_with("regent "));
}
