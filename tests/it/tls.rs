//! TLS between broker and PostgreSQL (`spec/security-operations.md` §5): what is asked for is what happens.

use std::net::{Ipv4Addr, TcpListener};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use sqlx::{Connection, PgConnection};

use crate::harness::{Broker, Server, Tls, empty_database};

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// A server certificate for the name `localhost`.
    fn certify_localhost(&self) -> Tls {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        Tls { certificate_pem: certificate.pem(), key_pem: key.serialize_pem(), port }
    }
}

/// Whether a broker on `server` started and has all its connections under TLS; its refusal otherwise.
async fn outcome<const N: usize>(server: &Server, variables: [(&str, &str); N]) -> Result<bool, String> {
    let broker = Broker::from_environment(variables).await?;
    assert!(broker.is_healthy().await);
    let mut connection = PgConnection::connect(&server.url("postgres")).await.unwrap();
    let sql =
        "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'regent'";
    let all: Option<bool> = sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    broker.stop().await;
    Ok(all.expect("a broker has connections"))
}

/// The certificate decides: given authority, another one, the public ones, none at all; the name counts too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_certificate_of_the_database_is_checked_as_configured() {
    let (ours, other) = (Authority::new(), Authority::new());
    let tls = ours.certify_localhost();
    let port = tls.port.to_string();
    let server = tokio::task::spawn_blocking(move || Server::with_tls(&tls)).await.unwrap();
    let (host, port) = (("PG_HOST", "localhost"), ("PG_PORT", port.as_str()));
    let (on, trust) = (("PG_USE_SSL", "true"), ("PG_SSL_ROOT_CERT", ours.pem.as_str()));
    let url = format!("postgres://postgres@localhost:{}/postgres", port.1);

    assert_eq!(outcome(&server, [host, port, on, trust]).await, Ok(true));
    let one_line = ours.pem.replace('\n', "\\n");
    assert_eq!(outcome(&server, [host, port, on, ("PG_SSL_ROOT_CERT", one_line.as_str())]).await, Ok(true));
    assert_eq!(outcome(&server, [("DATABASE_URL", url.as_str()), trust]).await, Ok(true));
    assert_eq!(outcome(&server, [host, port, on, ("PG_SSL_REJECT_UNAUTHORIZED", "false")]).await, Ok(true));
    assert_eq!(outcome(&server, [host, port]).await, Ok(false), "without PG_USE_SSL it is plaintext");

    let wrong = ("PG_SSL_ROOT_CERT", other.pem.as_str());
    let refusals = [
        outcome(&server, [host, port, on, wrong]).await,
        outcome(&server, [host, port, on, wrong, ("PG_SSL_REJECT_UNAUTHORIZED", "false")]).await,
        outcome(&server, [("DATABASE_URL", url.as_str()), wrong]).await,
        outcome(&server, [("DATABASE_URL", format!("{url}?sslmode=require").as_str()), wrong]).await,
        outcome(&server, [host, port, on]).await,
        outcome(&server, [("DATABASE_URL", url.as_str()), on]).await,
        outcome(&server, [("PG_HOST", "127.0.0.1"), port, on, trust]).await,
    ];
    for refusal in refusals {
        assert!(refusal.as_ref().is_err_and(|text| text.contains("certificate")), "{refusal:?}");
    }
    let any_name = format!("postgres://postgres@127.0.0.1:{}/postgres?sslmode=verify-ca", port.1);
    assert_eq!(outcome(&server, [("DATABASE_URL", any_name.as_str()), trust]).await, Ok(true));
}

/// "Never fall back to plaintext."
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_without_tls_is_refused_once_tls_is_asked_for() {
    let db = empty_database().await;
    let authority = Authority::new();
    for asked in [("PG_USE_SSL", "true"), ("PG_SSL_ROOT_CERT", authority.pem.as_str())] {
        for accept_any in ["true", "false"] {
            let url = ("DATABASE_URL", db.url.as_str());
            let refusal = Broker::from_environment([url, asked, ("PG_SSL_REJECT_UNAUTHORIZED", accept_any)]).await;
            assert!(refusal.is_err_and(|text| text.contains("server does not support TLS")), "{asked:?}");
        }
    }
}
