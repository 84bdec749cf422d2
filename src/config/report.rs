//! What is logged about the configuration at boot. Holds no secrets.

use std::any::TypeId;

use clap::{Arg, ArgMatches, Command};

use super::secret::{self, Secret};
use super::{boolean, environment};

/// The settings as text, and the complaints about them.
#[derive(Debug, Clone, Default)]
pub(super) struct BootReport {
    /// In the order of the help.
    pub(super) sections: Vec<Section>,
    pub(super) warnings: Vec<String>,
}

/// The settings of one section of the help.
#[derive(Debug, Clone)]
pub(super) struct Section {
    name: String,
    settings: Vec<Setting>,
}

#[derive(Debug, Clone)]
struct Setting {
    text: String,
    is_default: bool,
}

impl BootReport {
    pub(super) fn new(documented: &Command, matches: &ArgMatches, warnings: Vec<String>) -> Self {
        let mut sections: Vec<Section> = Vec::new();
        for arg in documented.get_arguments().filter(|arg| environment::variable(arg).is_some()) {
            let name = arg.get_help_heading().unwrap_or("Server");
            let setting = Setting::new(arg, matches);
            match sections.iter_mut().find(|section| section.name == name) {
                Some(section) => section.settings.push(setting),
                None => sections.push(Section { name: name.to_owned(), settings: vec![setting] }),
            }
        }
        Self { sections, warnings }
    }

    /// What differs from the defaults at `info`, everything at `debug`.
    pub(super) fn log(&self) {
        for section in &self.sections {
            tracing::debug!("config: all of {}", section.line(|_| true).unwrap_or_default());
        }
        for line in self.changes() {
            tracing::info!("config: {line}");
        }
        for warning in &self.warnings {
            tracing::warn!("config: {warning}");
        }
    }

    /// A line per section with settings that differ from their defaults.
    pub(super) fn changes(&self) -> Vec<String> {
        let changed = self.sections.iter().filter_map(|section| section.line(|setting| !setting.is_default));
        let lines: Vec<String> = changed.collect();
        if lines.is_empty() { vec!["all defaults".to_owned()] } else { lines }
    }
}

impl Section {
    fn line(&self, shown: impl Fn(&Setting) -> bool) -> Option<String> {
        let settings: Vec<&str> = self.settings.iter().filter(|s| shown(s)).map(|s| s.text.as_str()).collect();
        (!settings.is_empty()).then(|| format!("{}: {}", self.name, settings.join(" ")))
    }
}

impl Setting {
    fn new(arg: &Arg, matches: &ArgMatches) -> Self {
        let raw = matches.get_raw(arg.get_id().as_str()).into_iter().flatten().last();
        let value = raw.map(|raw| raw.to_string_lossy().into_owned()).unwrap_or_default();
        let default = arg.get_default_values().first().map(|value| value.to_string_lossy()).unwrap_or_default();
        let is_default = value == default
            || (arg.get_value_parser().type_id() == TypeId::of::<bool>() && boolean(&value) == boolean(&default));
        let shown = if arg.get_value_parser().type_id() == TypeId::of::<Secret>() {
            secret::redacted(&value)
        } else if value.contains("-----BEGIN") {
            format!("<PEM, {} chars>", value.len())
        } else if value.is_empty() {
            "<unset>".to_owned()
        } else {
            value
        };
        let name = arg.get_long().unwrap_or_default().replace('-', "_");
        Self { text: format!("{name}={shown}"), is_default }
    }
}
