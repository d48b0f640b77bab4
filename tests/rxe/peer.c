// The peer of the example rnic-one-sided on any verbs device, in particular Linux' rdma_rxe in a guest: WRITE, WRITE
// with immediate, READ, compare-and-swap and fetch-and-add in both directions, and finally a WRITE with an invalid key.
// peer DEVICE GID_INDEX ROUNDS: listens on TCP port 18516. Exits with 0 if all results were correct in every round.
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PORT = 18516, BYTES = 65536, PATTERN_BYTES = 8000, IMMEDIATE_AT = 8192, COPY_AT = 16384, WORD_AT = 32768 };
enum { IMMEDIATE = 0xabcd1234, IMMEDIATE_BYTES = 100 };

static void check(int is_true, const char *what) {
    if (!is_true) {
        fprintf(stderr, "peer: %s\n", what);
        exit(1);
    }
}

static uint8_t memory[BYTES] __attribute__((aligned(4096)));
static struct ibv_mr *region;
static struct ibv_cq *queue;
static struct ibv_qp *qp;
static uint64_t remote_address;
static uint32_t remote_key;

static enum ibv_wc_status next_status(uint32_t *immediate) {
    struct ibv_wc wc;
    int count;
    while ((count = ibv_poll_cq(queue, 1, &wc)) == 0) {
    }
    check(count == 1, "ibv_poll_cq");
    if (immediate && wc.status == IBV_WC_SUCCESS) *immediate = ntohl(wc.imm_data);
    return wc.status;
}

static enum ibv_wc_status request(struct ibv_send_wr *wr, uint64_t local, uint32_t bytes) {
    struct ibv_sge piece = {.addr = (uintptr_t)memory + local, .length = bytes, .lkey = region->lkey};
    struct ibv_send_wr *bad;
    wr->sg_list = &piece;
    wr->num_sge = 1;
    wr->send_flags = IBV_SEND_SIGNALED;
    check(!ibv_post_send(qp, wr, &bad), "ibv_post_send");
    return next_status(NULL);
}

static struct ibv_send_wr rdma(enum ibv_wr_opcode opcode, uint64_t remote, uint32_t key) {
    struct ibv_send_wr wr = {.opcode = opcode, .imm_data = htonl(IMMEDIATE)};
    wr.wr.rdma.remote_addr = remote_address + remote;
    wr.wr.rdma.rkey = key;
    return wr;
}

static uint64_t atomic(enum ibv_wr_opcode opcode, uint64_t compare_add, uint64_t swap) {
    struct ibv_send_wr wr = {.opcode = opcode};
    wr.wr.atomic.remote_addr = remote_address + WORD_AT;
    wr.wr.atomic.rkey = remote_key;
    wr.wr.atomic.compare_add = compare_add;
    wr.wr.atomic.swap = swap;
    check(request(&wr, 40000, 8) == IBV_WC_SUCCESS, "an atomic failed");
    uint64_t before;
    memcpy(&before, memory + 40000, 8);
    return before;
}

static void fill(uint8_t *bytes) {
    for (int at = 0; at < PATTERN_BYTES; at++) bytes[at] = (uint8_t)(at * 7 + 1);
}

// Performs all operations on the peer's memory.
static void initiate(void) {
    static uint8_t pattern[PATTERN_BYTES];
    fill(pattern);
    memcpy(memory + COPY_AT, pattern, PATTERN_BYTES);
    struct ibv_send_wr wr = rdma(IBV_WR_RDMA_WRITE, 0, remote_key);
    check(request(&wr, COPY_AT, PATTERN_BYTES) == IBV_WC_SUCCESS, "WRITE failed");
    wr = rdma(IBV_WR_RDMA_WRITE_WITH_IMM, IMMEDIATE_AT, remote_key);
    check(request(&wr, COPY_AT, IMMEDIATE_BYTES) == IBV_WC_SUCCESS, "WRITE with immediate failed");
    memset(memory + COPY_AT, 0, PATTERN_BYTES);
    wr = rdma(IBV_WR_RDMA_READ, 0, remote_key);
    check(request(&wr, COPY_AT, PATTERN_BYTES) == IBV_WC_SUCCESS, "READ failed");
    check(!memcmp(memory + COPY_AT, pattern, PATTERN_BYTES), "READ returned other data than was written");
    check(atomic(IBV_WR_ATOMIC_CMP_AND_SWP, 5, 9) == 5, "compare-and-swap returned a wrong value");
    check(atomic(IBV_WR_ATOMIC_CMP_AND_SWP, 5, 1) == 9, "the second compare-and-swap returned a wrong value");
    check(atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, 3, 0) == 9, "fetch-and-add returned a wrong value");
}

// Checks the results of the peer's operations in the local memory.
static void check_memory(void) {
    static uint8_t pattern[PATTERN_BYTES];
    fill(pattern);
    uint64_t word;
    memcpy(&word, memory + WORD_AT, 8);
    check(!memcmp(memory, pattern, PATTERN_BYTES), "WRITE stored other data");
    check(!memcmp(memory + IMMEDIATE_AT, pattern, IMMEDIATE_BYTES), "WRITE with immediate stored other data");
    uint32_t immediate = 0;
    check(next_status(&immediate) == IBV_WC_SUCCESS && immediate == IMMEDIATE, "the immediate is wrong");
    check(word == 12, "atomics left a wrong value");
}

// Resets the memory for the next round.
static void reset_memory(void) {
    uint64_t five = 5;
    memset(memory, 0, sizeof memory);
    memcpy(memory + WORD_AT, &five, 8);
}

static void post_receive(void) {
    struct ibv_recv_wr wr = {.wr_id = 1}, *bad;
    check(!ibv_post_recv(qp, &wr, &bad), "ibv_post_recv");
}

static void connect_qp(uint32_t peers_qp, uint32_t peers_psn, union ibv_gid peers_gid, int gid_index) {
    int rights = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = rights};
    check(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
    struct ibv_qp_attr receive = {
        .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peers_qp, .rq_psn = peers_psn,
        .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1,
                    .grh = {.dgid = peers_gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64}},
    };
    check(!ibv_modify_qp(qp, &receive, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
    struct ibv_qp_attr send = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = 0xfffffe, .max_rd_atomic = 4,
    };
    check(!ibv_modify_qp(qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
}

static struct ibv_context *open_device(const char *name) {
    int count = 0;
    struct ibv_device **devices = ibv_get_device_list(&count);
    for (int at = 0; at < count; at++) {
        if (!strcmp(ibv_get_device_name(devices[at]), name)) return ibv_open_device(devices[at]);
    }
    check(0, "no such device");
    return NULL;
}

// Accepts the TCP connection for exchanging connection parameters.
static int accept_peer(void) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    int is_listening = !bind(listener, (struct sockaddr *)&here, sizeof here) && !listen(listener, 1);
    check(is_listening, "cannot listen on TCP port 18516");
    return accept(listener, NULL, NULL);
}

int main(int count, char **arguments) {
    check(count == 4, "give a device, the index of its GID and the number of rounds");
    int rounds = atoi(arguments[3]);
    check(rounds > 0, "at least one round");
    struct ibv_context *device = open_device(arguments[1]);
    check(device != NULL, "the device cannot be opened");
    int gid_index = atoi(arguments[2]);
    struct ibv_pd *domain = ibv_alloc_pd(device);
    region = ibv_reg_mr(domain, memory, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                                   IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    queue = ibv_create_cq(device, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {
        .send_cq = queue, .recv_cq = queue, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1},
    };
    qp = ibv_create_qp(domain, &init);
    check(region && queue && qp, "the device provides no memory region, completion queue or queue pair");
    union ibv_gid own;
    check(!ibv_query_gid(device, 1, gid_index, &own), "no such GID");
    int stream = accept_peer();
    FILE *from_peer = fdopen(stream, "r"), *to_peer = fdopen(dup(stream), "w");
    check(from_peer && to_peer, "accept on TCP port 18516 failed");
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint32_t peers_qp, peers_psn, last;
    char gid_text[64];
    check(fscanf(from_peer, "%" SCNx32 " %" SCNx32 " %63s %" SCNx32 " %" SCNx64, &peers_qp, &peers_psn, gid_text,
                 &remote_key, &remote_address) == 5, "the peer's connection parameters are invalid");
    union ibv_gid peers_gid;
    check(inet_pton(AF_INET6, gid_text, &peers_gid) == 1, "the peer's GID is invalid");
    connect_qp(peers_qp, peers_psn, peers_gid, gid_index);
    reset_memory();
    char own_text[64];
    inet_ntop(AF_INET6, &own, own_text, sizeof own_text);
    fprintf(to_peer, "%x %x %s %x %" PRIx64 "\n", qp->qp_num, 0xfffffe, own_text, region->rkey,
            (uint64_t)(uintptr_t)memory);
    fflush(to_peer);
    for (int round = 0; round < rounds; round++) {
        post_receive();
        check(fscanf(from_peer, "%" SCNx32, &last) == 1, "the peer closed the connection");
        initiate();
        fprintf(to_peer, "1\n");
        fflush(to_peer);
        check(fscanf(from_peer, "%" SCNx32, &last) == 1, "the peer closed the connection");
        check_memory();
        reset_memory();
    }
    printf("peer: %d rounds of WRITE, WRITE with immediate, READ and atomics, to the engine and from it: all correct\n",
           rounds);
    struct ibv_send_wr wr = rdma(IBV_WR_RDMA_WRITE, 0, remote_key ^ 0x00ff0000);
    enum ibv_wc_status status = request(&wr, COPY_AT, 64);
    // The responder sends one NAK and then no more responses, so where packets are lost, the NAK may be lost.
    int is_nak_lost = rounds > 1 && status == IBV_WC_RETRY_EXC_ERR;
    check(status == IBV_WC_REM_ACCESS_ERR || is_nak_lost, "an invalid key is not refused");
    puts(is_nak_lost ? "peer: an invalid key gets no response" : "peer: an invalid key is refused");
    fprintf(to_peer, "2\n");
    fflush(to_peer);
    return 0;
}
