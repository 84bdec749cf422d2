//! TLS to PostgreSQL: how far its certificate is checked, and that nothing falls back to plaintext unasked.

use sqlx::postgres::{PgConnectOptions, PgSslMode};

/// What the settings beside the URL ask for (security-operations §5).
#[derive(Clone, Debug)]
pub struct TlsSettings {
    /// Nothing but TLS.
    pub required: bool,
    /// A certificate authority to trust beside the public ones, as PEM text.
    pub root_cert_pem: Option<String>,
    /// Whether any certificate is accepted where no authority is given.
    pub accept_any: bool,
}

impl TlsSettings {
    /// Sets them on `options`, and says for the boot log what holds. A mode of the URL that leaves nothing open wins;
    /// one that would take plaintext too (`prefer`, `allow`, or none) gives way as soon as TLS is asked for.
    pub fn apply(self, options: PgConnectOptions) -> (PgConnectOptions, &'static str) {
        let has_authority = self.root_cert_pem.is_some();
        let mode = match options.get_ssl_mode() {
            PgSslMode::Prefer | PgSslMode::Allow if has_authority => PgSslMode::VerifyFull,
            PgSslMode::Prefer | PgSslMode::Allow if self.required && self.accept_any => PgSslMode::Require,
            PgSslMode::Prefer | PgSslMode::Allow if self.required => PgSslMode::VerifyFull,
            // As in libpq: an authority is there to be used. The driver alone would accept any certificate.
            PgSslMode::Require if has_authority => PgSslMode::VerifyCa,
            stated => stated,
        };
        let options = match self.root_cert_pem {
            Some(pem) => options.ssl_root_cert_from_pem(pem.into_bytes()),
            None => options,
        };
        let trust = match (mode, has_authority) {
            (PgSslMode::VerifyCa | PgSslMode::VerifyFull, true) => "supplied-ca",
            (PgSslMode::VerifyCa | PgSslMode::VerifyFull, false) => "webpki-roots",
            (PgSslMode::Require, _) => "accept-any",
            (PgSslMode::Prefer, _) => "opportunistic",
            (PgSslMode::Allow | PgSslMode::Disable, _) => "plaintext",
        };
        (options.ssl_mode(mode), trust)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The mode and the trust for a URL with `mode`, as seen by the driver.
    fn applied(mode: &str, required: bool, authority: bool, accept_any: bool) -> String {
        let url = format!("postgres://u@h/d?sslmode={mode}");
        let root_cert_pem = authority.then(|| "-----BEGIN CERTIFICATE-----".to_owned());
        let settings = TlsSettings { required, root_cert_pem, accept_any };
        let (options, trust) = settings.apply(url.parse().unwrap());
        format!("{:?} {trust}", options.get_ssl_mode())
    }

    #[test]
    fn a_mode_that_may_end_in_plaintext_gives_way_once_tls_is_asked_for() {
        for open in ["prefer", "allow"] {
            assert_eq!(applied(open, true, false, false), "VerifyFull webpki-roots");
            assert_eq!(applied(open, true, false, true), "Require accept-any");
            assert_eq!(applied(open, true, true, true), "VerifyFull supplied-ca");
            assert_eq!(applied(open, false, true, false), "VerifyFull supplied-ca");
        }
        assert_eq!(applied("prefer", false, false, false), "Prefer opportunistic");
    }

    #[test]
    fn a_mode_that_says_it_all_wins() {
        assert_eq!(applied("disable", true, true, false), "Disable plaintext");
        assert_eq!(applied("require", true, false, false), "Require accept-any");
        assert_eq!(applied("require", false, true, false), "VerifyCa supplied-ca");
        assert_eq!(applied("verify-ca", true, false, true), "VerifyCa webpki-roots");
        assert_eq!(applied("verify-full", false, true, false), "VerifyFull supplied-ca");
    }
}
