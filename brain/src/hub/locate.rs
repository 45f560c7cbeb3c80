//! From what the settings name to folders on this disk.

use std::path::{Path, PathBuf};

use super::{
    HubError, HubSettings, ModelName,
    client::Patience,
    files::Part,
    progress::{Progress, Say},
    pull::Hub,
};
use crate::model::{drafter_of, drafter_places};

/// Where a model or a drafter is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this folder.
    Folder(PathBuf),
    /// On the hub, or in its cache.
    Hub(ModelName),
}

/// Which drafter is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drafting {
    /// The one that belongs to the model, if there is one.
    Auto,
    /// None.
    None,
    /// This one.
    At(Place),
}

/// Folders to load from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// The model's.
    pub model: PathBuf,
    /// Its drafter's.
    pub drafter: Option<PathBuf>,
}

/// Finds the folders, fetching what is on the hub. Blocks for as long as that takes; `say` gets
/// what a user wants to know meanwhile.
pub fn locate(model: &Place, drafting: &Drafting, say: Say) -> Result<Located, HubError> {
    let progress = Progress::new(say);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| HubError::Io {
            action: "start the downloads for",
            path: match model {
                Place::Folder(folder) => folder.clone(),
                Place::Hub(name) => name.to_string().into(),
            },
            source,
        })?;
    runtime.block_on(async {
        let hub = || Hub::new(HubSettings::from_environment()?, Patience::default());
        let named = async |name: &ModelName, part| {
            Ok::<_, HubError>(hub()?.pull(name, part, &progress).await?.folder)
        };
        let drafter = match drafting {
            Drafting::At(Place::Hub(name)) => Some(named(name, Part::Drafter).await?),
            Drafting::At(Place::Folder(folder)) => Some(folder.clone()),
            Drafting::Auto | Drafting::None => None,
        };
        let find = *drafting == Drafting::Auto;
        match model {
            Place::Folder(folder) if find => Ok(Located {
                model: folder.clone(),
                drafter: beside(folder, &progress),
            }),
            Place::Folder(folder) => Ok(Located {
                model: folder.clone(),
                drafter,
            }),
            Place::Hub(name) => {
                let hub = hub()?;
                let target = hub.pull(name, Part::Target, &progress).await?;
                let drafter = if find {
                    hub.drafter_of(name, &target, &progress).await?
                } else {
                    drafter
                };
                Ok(Located {
                    model: target.folder,
                    drafter,
                })
            }
        }
    })
}

/// The drafter of a folder; a note if there is none.
fn beside(folder: &Path, progress: &Progress) -> Option<PathBuf> {
    let found = drafter_of(folder);
    if found.is_none() {
        let places = drafter_places(folder);
        let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
        let places = places.join(" nor ");
        progress.note(&format!(
            "no drafter: neither {places} is there; give one with --drafter"
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    fn located(folder: &Path) -> (Located, String) {
        let said = Arc::new(Mutex::new(String::new()));
        let hear = said.clone();
        let say: Say = Box::new(move |text| hear.lock().unwrap().push_str(text));
        let found = locate(&Place::Folder(folder.to_owned()), &Drafting::Auto, say).unwrap();
        let said = said.lock().unwrap().clone();
        (found, said)
    }

    #[test]
    fn a_drafter_beside_a_folder_is_found_even_if_it_is_broken() {
        let root = tempfile::tempdir().unwrap();
        let model = root.path().join("gemma");
        std::fs::create_dir(&model).unwrap();
        let (none, said) = located(&model);
        assert_eq!(none.drafter, None);
        assert!(said.contains("gemma-assistant"), "{said}");

        let sibling = root.path().join("gemma-assistant");
        std::fs::create_dir(&sibling).unwrap();
        assert_eq!(located(&model).0.drafter, Some(sibling));

        // A link to nowhere is a broken drafter, not none.
        let inside = model.join("assistant");
        std::os::unix::fs::symlink("gone", &inside).unwrap();
        let (found, said) = located(&model);
        assert_eq!((found.drafter, said.as_str()), (Some(inside), ""));
    }
}
