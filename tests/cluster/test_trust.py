"""Trust on disk: who may make nodes, what a node is handed, and what others must not read."""

import multiprocessing
import shutil
import ssl
import stat
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster.certificates import facts, revocations_number
from omlx.cluster.membership import (
    WARN_BEFORE,
    Bundle,
    News,
    install_bundle,
    install_news,
    open_member,
    remove_bundle,
)
from omlx.cluster.trust import (
    Issued,
    Ledger,
    Trust,
    init_trust,
    issue,
    open_trust,
    renew,
    revoke,
)
from omlx.errors import BadSetting

NOW = datetime(2026, 12, 1, tzinfo=UTC)


def found(folder: Path) -> Trust:
    return init_trust(folder, "head", ["head.local"], ["10.0.0.1"])


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return found(tmp_path / "cluster")


def test_a_new_cluster_is_a_node_of_itself_and_is_found_again(trust: Trust) -> None:
    assert open_trust(trust.folder) == trust
    member = open_member(trust.folder)
    assert (member.cluster_id, member.node_id) == (trust.cluster_id, "head")
    assert member.days_left(datetime.now(UTC)) in (364, 365)
    assert len(member.token_path.read_text()) == 64
    assert trust.ssh_public_key().startswith("ssh-ed25519 ")
    assert trust.ssh_key.read_text().startswith("-----BEGIN OPENSSH PRIVATE KEY-----")


def test_nothing_in_the_folder_is_open_to_others(trust: Trust) -> None:
    install_bundle(trust.folder.parent / "other", issue(trust, "b", [], []))
    for folder in (trust.folder, trust.folder.parent / "other"):
        everything = [folder, *folder.rglob("*")]
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in everything}
        assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes


def test_a_cluster_is_not_overwritten(trust: Trust) -> None:
    before = {path: path.read_bytes() for path in trust.folder.rglob("*") if path.is_file()}
    with pytest.raises(BadSetting, match="already holds a cluster"):
        found(trust.folder)
    assert {path: path.read_bytes() for path in trust.folder.rglob("*") if path.is_file()} == before


def _try(folder: Path, answers: "multiprocessing.Queue[str]") -> None:
    try:
        answers.put(found(folder).cluster_id)
    except BadSetting as error:
        answers.put(str(error))


def test_of_two_that_make_a_cluster_at_once_one_is_told_no(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = fork.Queue()
    both = [fork.Process(target=_try, args=(tmp_path / "cluster", answers)) for _ in range(2)]
    for process in both:
        process.start()
    said = [answers.get(timeout=20) for _ in both]
    for process in both:
        process.join(timeout=20)
    (refused,) = [answer for answer in said if "already holds" in answer]
    said.remove(refused)
    assert open_trust(tmp_path / "cluster").cluster_id == said[0]


def test_what_a_power_cut_left_of_a_new_cluster_is_completed(trust: Trust) -> None:
    remove_bundle(trust.folder)
    (trust.folder / "authority-0000").mkdir()
    assert open_trust(trust.folder) == trust
    assert open_member(trust.folder).node_id == "head"


@pytest.mark.parametrize("name", ["authority/ca.key", "authority/ray_token", "authority/ledger.json"])
def test_a_secret_that_others_can_read_is_not_used(trust: Trust, name: str) -> None:
    (trust.folder / name).chmod(0o644)
    with pytest.raises(BadSetting, match=r"open to others \(mode 0644\)"):
        issue(trust, "b", [], [])


@pytest.mark.parametrize("name", ["node.key", "ray_token", "member.json"])
def test_a_node_refuses_its_own_secret_when_others_can_read_it(trust: Trust, name: str) -> None:
    (trust.folder / "node" / name).chmod(0o640)
    with pytest.raises(BadSetting, match="chmod 600"):
        open_member(trust.folder)


def test_a_folder_into_which_others_write_is_not_used(trust: Trust) -> None:
    trust.folder.chmod(0o777)
    with pytest.raises(BadSetting, match="others can write"):
        open_trust(trust.folder)
    with pytest.raises(BadSetting, match="others can write"):
        open_member(trust.folder)


def test_a_link_in_a_secrets_place_is_not_followed(trust: Trust, tmp_path: Path) -> None:
    key = trust.authority / "ca.key"
    key.rename(tmp_path / "elsewhere")
    key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadSetting, match="no plain file"):
        issue(trust, "b", [], [])


def test_a_bundle_travels_and_makes_a_node(trust: Trust, tmp_path: Path) -> None:
    bundle = issue(trust, "b", ["b.local"], ["10.0.0.2", "fe80::1%en0"])
    assert bundle.token not in repr(bundle)
    assert "PRIVATE" not in repr(bundle)
    assert Bundle.unpack(bundle.pack()) == bundle
    member = install_bundle(tmp_path / "b", Bundle.unpack(bundle.pack()))
    assert (member.cluster_id, member.node_id) == (trust.cluster_id, "b")
    assert member == open_member(tmp_path / "b")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff" * 40, b" " * (2**20 + 1)])
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    with pytest.raises(BadSetting, match="bundle"):
        Bundle.unpack(data)


def test_a_bundle_that_does_not_agree_with_itself_is_refused(trust: Trust, tmp_path: Path) -> None:
    good, other = issue(trust, "b", [], []), issue(trust, "c", [], [])
    foreign = issue(found(tmp_path / "elsewhere"), "b", [], [])
    for wrong in (
        replace(good, node_id="c"),
        replace(good, key=other.key),
        replace(good, certificate=foreign.certificate, key=foreign.key),
        replace(good, revocations=foreign.revocations),
        replace(good, certificate=b"none"),
        replace(good, revocations=b"none"),
        replace(good, token="no\ntoken"),
        replace(good, cluster_id="../.."),
    ):
        with pytest.raises(BadSetting):
            install_bundle(tmp_path / "b", wrong)
    with pytest.raises(BadSetting, match="in no cluster"):
        open_member(tmp_path / "b")


@pytest.mark.parametrize("node_id", ["", "-oProxyCommand=x", "a b", "a/b", "x" * 65, "a\n", "é"])
def test_an_id_that_is_none_gets_no_certificate(trust: Trust, node_id: str) -> None:
    with pytest.raises(BadSetting, match="no node id"):
        issue(trust, node_id, [], [])


@pytest.mark.parametrize("name", ["", "-x", "a..b", "a b", "a\n", "*.local", "x" * 64])
def test_a_name_that_is_none_gets_no_certificate(trust: Trust, name: str) -> None:
    with pytest.raises(BadSetting, match="no host name"):
        issue(trust, "b", [name], [])


def test_an_address_that_is_none_gets_no_certificate(trust: Trust) -> None:
    with pytest.raises(BadSetting, match="no IP address"):
        issue(trust, "b", [], ["10.0.0.300"])


def test_a_node_of_one_cluster_does_not_slip_into_another(trust: Trust, tmp_path: Path) -> None:
    other = found(tmp_path / "elsewhere")
    install_bundle(tmp_path / "b", issue(trust, "b", [], []))
    with pytest.raises(BadSetting, match=f"node of cluster {trust.cluster_id}"):
        install_bundle(tmp_path / "b", issue(other, "b", [], []))
    with pytest.raises(BadSetting, match=f"node of cluster {trust.cluster_id}"):
        found(tmp_path / "b")
    remove_bundle(tmp_path / "b")
    assert install_bundle(tmp_path / "b", issue(other, "b", [], [])).cluster_id == other.cluster_id


def test_renewed_keeps_names_and_has_a_year_again(trust: Trust, tmp_path: Path) -> None:
    old = issue(trust, "b", ["b.local"], ["10.0.0.2"], timedelta(days=3))
    member = install_bundle(tmp_path / "b", old)
    assert "runs out in 2 days" in (member.warning(datetime.now(UTC)) or "")
    new = renew(trust, "b")
    member = install_bundle(tmp_path / "b", new)
    assert member.warning(datetime.now(UTC)) is None
    assert facts(new.certificate).serial != facts(old.certificate).serial
    lines = [line for line in trust.ledger().issued if line.node_id == "b"]
    assert [(line.names, line.addresses) for line in lines] == [(("b.local",), ("10.0.0.2",))] * 2
    for _ in range(5):  # nothing piles up
        install_bundle(tmp_path / "b", renew(trust, "b"))
    assert len(list((tmp_path / "b").glob("node-*"))) <= 2


def test_renewed_for_other_addresses_names_them_and_no_old_one(trust: Trust) -> None:
    issue(trust, "b", ["b.local"], ["10.0.0.2"])
    renew(trust, "b", ["10.0.0.3", "fe80::1%en0", "10.0.0.3"])
    line = trust.ledger().newest("b")
    assert line is not None
    assert (line.names, line.addresses) == (("b.local",), ("10.0.0.3", "fe80::1"))
    with pytest.raises(BadSetting, match="no IP address"):
        renew(trust, "b", ["10.0.0.300"])


def test_a_certificate_serves_while_it_names_every_address_and_lasts_a_month() -> None:
    line = Issued("a1", "b", (), ("10.0.0.2", "10.0.1.2"), NOW + WARN_BEFORE)
    assert line.serves([], NOW) and line.serves(["10.0.1.2", "127.0.0.1"], NOW)
    assert not line.serves(["10.0.0.2", "10.0.0.3"], NOW)
    assert not line.serves([], NOW + timedelta(seconds=1))
    ledger = Ledger((replace(line, serial="a0"), line))
    assert ledger.find("a1") is line and ledger.find("a2") is None


def test_a_certificate_that_ran_out_is_said(trust: Trust, tmp_path: Path) -> None:
    member = install_bundle(tmp_path / "b", issue(trust, "b", [], [], timedelta(seconds=-1)))
    assert "ran out on" in (member.warning(datetime.now(UTC)) or "")
    assert member.days_left(datetime.now(UTC)) == -1


def test_revoked_is_not_renewed_but_may_be_let_in_anew(trust: Trust, tmp_path: Path) -> None:
    bundle = issue(trust, "b", [], [])
    listed = revoke(trust, "b")
    assert revocations_number(listed.revocations, bundle.authority) == 2
    assert revocations_number(revoke(trust, "b").revocations, bundle.authority) == 2
    with pytest.raises(BadSetting, match="no node of this cluster"):
        renew(trust, "b")
    install_bundle(tmp_path / "b", issue(trust, "b", [], []))
    with pytest.raises(BadSetting, match="never a node"):
        revoke(trust, "z")
    with pytest.raises(BadSetting, match="coordinator itself"):
        revoke(trust, "head")


def test_a_revocation_list_never_goes_back_and_comes_from_our_authority(trust: Trust, tmp_path: Path) -> None:
    bundle = issue(trust, "b", [], [])
    issue(trust, "c", [], [])
    install_bundle(tmp_path / "b", bundle)
    old = trust.news()
    new = revoke(trust, "c")
    assert install_news(tmp_path / "b", new)
    assert not install_news(tmp_path / "b", old)
    install_bundle(tmp_path / "b", bundle)  # an older bundle brings an older list
    assert not install_news(tmp_path / "b", News.unpack(new.pack()))
    assert open_member(tmp_path / "b").token_path.read_text() == new.token
    assert new.token not in (old.token, repr(new))
    with pytest.raises(BadSetting, match="another authority"):
        install_news(tmp_path / "b", found(tmp_path / "elsewhere").news())


def test_who_is_revoked_does_not_know_rays_token_any_more(trust: Trust) -> None:
    bundle = issue(trust, "b", [], [])
    news = revoke(trust, "b")
    assert news.token != bundle.token
    assert open_member(trust.folder).token_path.read_text() == news.token == trust.token()
    assert issue(trust, "c", [], []).token == news.token


def test_rays_grpc_finds_names_and_addresses_in_the_certificate(trust: Trust, tmp_path: Path) -> None:
    member = install_bundle(tmp_path / "b", issue(trust, "b", ["b.local"], ["10.0.0.2"]))
    for name, good in [("b.local", True), ("10.0.0.2", True), ("127.0.0.1", True), ("c.local", False)]:
        context = open_member(trust.folder).security.context(server=False)
        context.check_hostname = True
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(down, up, server_hostname=name)
        server = member.security.context(server=True).wrap_bio(up, down, server_side=True)
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        if good:
            client.do_handshake()
        else:
            with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
                client.do_handshake()


def test_a_revocation_that_a_power_cut_stopped_halfway_is_completed(trust: Trust) -> None:
    issue(trust, "b", [], [])
    backup = (trust.folder / "node" / "revocations.crl").read_bytes()
    revoke(trust, "b")
    listed = trust.folder / "node" / "revocations.crl"
    listed.write_bytes(backup)
    open_trust(trust.folder)
    assert revocations_number(listed.read_bytes(), (trust.authority / "ca.crt").read_bytes()) == 2


def test_leaving_takes_the_node_away_and_leaves_the_authority(trust: Trust) -> None:
    remove_bundle(trust.folder)
    with pytest.raises(BadSetting, match="in no cluster"):
        open_member(trust.folder)
    assert (trust.authority / "ca.key").exists()
    shutil.rmtree(trust.folder)
    remove_bundle(trust.folder)  # nothing there: nothing to do
    with pytest.raises(BadSetting, match="omlx cluster init"):
        open_trust(trust.folder)


NODES = st.sampled_from(["a", "b", "c"])
MOVES = st.lists(st.tuples(st.sampled_from(["add", "revoke"]), NODES), max_size=30)


@given(MOVES)
def test_after_any_moves_a_node_counts_when_it_was_added_after_its_last_revocation(
    moves: list[tuple[str, str]],
) -> None:
    ledger, alive = Ledger(), set()
    for serial, (move, node) in enumerate(moves):
        before = ledger.number
        if move == "add":
            line = Issued(f"{serial:x}", node, (), (), NOW + timedelta(days=1))
            ledger = ledger.add(line, NOW)
            alive.add(node)
            assert ledger.number == before
        else:
            ledger = ledger.revoke(node)
            assert ledger.number == before + (node in alive)
            alive.discard(node)
    assert {line.node_id for line in ledger.issued if not line.revoked} == alive


def test_what_ran_out_long_ago_leaves_the_ledger() -> None:
    old = Issued("1", "a", (), (), NOW - timedelta(days=31), revoked=True)
    young = Issued("2", "a", (), (), NOW - timedelta(days=29), revoked=True)
    ledger = Ledger((old, young)).add(replace(old, serial="3", until=NOW), NOW)
    assert [line.serial for line in ledger.issued] == ["2", "3"]
