//! Which file system a path lies on.

use std::fs;
use std::path::{Path, PathBuf};

/// Types of file systems that are reached over a network, as mount tables name them. Locks and syncs
/// mean less there than on a local disk.
const NETWORK: &[&str] = &[
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.ceph",
    "fuse.cephfs",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.rclone",
    "fuse.s3fs",
    "fuse.sshfs",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "smb3",
    "smbfs",
    "virtiofs",
];

/// The type of the network file system that `directory` lies on; `None` for a local one, and where
/// the operating system has no mount table.
#[must_use]
pub fn network_file_system(directory: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mounts").ok()?;
    let directory = fs::canonicalize(directory).ok()?;
    let kind = file_system(&table, &directory)?;
    NETWORK.contains(&kind).then(|| kind.to_owned())
}

/// The type of the mount that `path` lies on: the deepest one, and of those the last, which covers
/// the others.
fn file_system<'a>(table: &'a str, path: &Path) -> Option<&'a str> {
    let mut found: Option<(usize, &str)> = None;
    for line in table.lines() {
        let mut fields = line.split(' ');
        let (Some(_), Some(mounted), Some(kind)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let mounted = PathBuf::from(unescaped(mounted));
        let depth = mounted.components().count();
        if path.starts_with(&mounted) && found.is_none_or(|(deepest, _)| depth >= deepest) {
            found = Some((depth, kind));
        }
    }
    found.map(|(_, kind)| kind)
}

/// The kernel writes space, tab, newline and backslash as a backslash and three octal digits.
fn unescaped(text: &str) -> String {
    let mut rest = text;
    let mut plain = String::with_capacity(text.len());
    while let Some((before, after)) = rest.split_once('\\') {
        plain.push_str(before);
        let code = after
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (code, after.get(3..)) {
            (Some(code), Some(left)) => {
                plain.push(char::from(code));
                rest = left;
            }
            _ => {
                plain.push('\\');
                rest = after;
            }
        }
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
sysfs /sys sysfs rw,nosuid 0 0
/dev/vda / ext4 rw,relatime 0 0
server:/export /srv/nfs nfs4 rw,vers=4.2 0 0
tmpfs /srv/nfs/scratch tmpfs rw 0 0
//host/share /mnt/with\\040space\\134 cifs rw 0 0
/dev/vdb /twice ext4 rw 0 0
user@host:/ /twice fuse.sshfs rw 0 0
cut
";

    /// Section 8: the deepest and last mount counts, by whole names.
    #[test]
    fn the_mount_of_a_path_is_found() {
        for (path, kind) in [
            ("/var/lib/kvgate", "ext4"),
            ("/srv/nfs", "nfs4"),
            ("/srv/nfs/data", "nfs4"),
            ("/srv/nfsd", "ext4"),
            ("/srv/nfs/scratch/data", "tmpfs"),
            ("/mnt/with space\\/data", "cifs"),
            ("/twice/data", "fuse.sshfs"),
        ] {
            assert_eq!(file_system(TABLE, Path::new(path)), Some(kind), "{path}");
        }
        assert_eq!(file_system("", Path::new("/")), None);
        assert_eq!(unescaped("a\\04"), "a\\04");
        assert_eq!(unescaped("\\999x"), "\\999x");
    }

    #[test]
    fn network_file_systems_are_told_from_local_ones() {
        let kind = |path| file_system(TABLE, Path::new(path)).unwrap();
        assert!(NETWORK.contains(&kind("/srv/nfs")));
        assert!(NETWORK.contains(&kind("/twice")));
        assert!(!NETWORK.contains(&kind("/")));
        assert_eq!(network_file_system(Path::new("/proc")), None);
        assert_eq!(network_file_system(Path::new("/no/such/place")), None);
    }
}
